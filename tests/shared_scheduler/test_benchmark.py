from benchmarks.scheduler import calibrate, time_decode, time_prompt


def test_every_case_runs_small() -> None:
    """No figure is asserted: a benchmark is never a timed test."""
    timings = [calibrate(num_runs=2), time_decode(8, num_steps=40), time_prompt(4, num_steps=2)]
    assert all(0 < timing.p10 <= timing.median for timing in timings)
