"""The program for a lent GPU runs to its end here, tiny, without packages that the GPU machine lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

MISSING_THERE = ("gguf", "nixl_cu12", "nixl_cu13", "pydantic", "pydantic_settings", "xgrammar", "fastapi")
PROGRAM = """
import runpy, sys
for name in {missing}:
    sys.modules[name] = None
sys.argv = ["device_check", *{arguments}]
runpy.run_module("benchmarks.device_check", run_name="__main__")
"""


def test_smoke_run_prints_every_row_without_packages_that_the_device_lacks(tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--device", "cpu", "--json", str(tmp_path / "rows.json")]
    program = PROGRAM.format(missing=MISSING_THERE, arguments=arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    metrics = {(row["case"], row["metric"]) for row in rows}
    assert ("this device", "copy") in metrics
    for num_streams in (1, 3):
        case = f"tandem, {num_streams} streams"
        for metric in ("prefill", "decode", "decode reads", "host overhead of a decode step", "whole"):
            assert (case, metric) in metrics
        theirs = next(row for row in rows if row["case"].startswith(f"transformers, {num_streams}"))
        assert theirs["value"] > 0
    tokens = [row for row in rows if row["metric"] == "tokens"]
    assert [(row["value"], row["ratio"]) for row in tokens] == [(8, 1.0), (24, 1.0)]
