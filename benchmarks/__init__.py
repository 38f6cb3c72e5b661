"""Benchmarks: `python -m benchmarks.<name> [--json FILE]`. Ratios within one run, never timed tests."""
