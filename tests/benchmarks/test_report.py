"""Rows carry the ratio to a baseline of the same run."""

import json
from pathlib import Path

from benchmarks.report import Report


def test_json_has_the_rows_with_their_ratios(tmp_path: Path) -> None:
    report = Report("example")
    report.add("small", "rate", 3.0, "GB/s", baseline=6.0)
    report.add("small", "calls", 2.0, "1")
    report.finish(tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == {
        "benchmark": "example",
        "rows": [
            {"case": "small", "metric": "rate", "value": 3.0, "unit": "GB/s", "baseline": 6.0, "ratio": 0.5},
            {"case": "small", "metric": "calls", "value": 2.0, "unit": "1", "baseline": None, "ratio": None},
        ],
    }
