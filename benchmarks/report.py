"""What every benchmark prints and writes: rows of case, metric, value and the ratio to a baseline."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` = value / baseline, where the baseline was measured in the same run."""

    case: str
    metric: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None


class Report:
    """Collects rows; `finish` prints them as a table and writes them as JSON when asked to."""

    def __init__(self, benchmark: str, *, is_printed_at_once: bool = False) -> None:
        """`is_printed_at_once`: each row as a line of JSON as well, for runs that may end early."""
        self.benchmark = benchmark
        self._is_printed_at_once = is_printed_at_once
        self.rows: list[Row] = []

    def add(self, case: str, metric: str, value: float, unit: str, baseline: float | None = None) -> None:
        ratio = value / baseline if baseline else None
        row = Row(case, metric, value, unit, baseline, ratio)
        self.rows.append(row)
        if self._is_printed_at_once:
            print(json.dumps(asdict(row)), flush=True)

    def finish(self, json_path: Path | None = None) -> None:
        table = Table(title=self.benchmark)
        for name in ("case", "metric", "value", "unit", "baseline", "ratio"):
            table.add_column(name, justify="left" if name in ("case", "metric", "unit") else "right")
        for row in self.rows:
            table.add_row(
                row.case, row.metric, _number(row.value), row.unit, _number(row.baseline), _number(row.ratio)
            )
        Console().print(table)
        if json_path is not None:
            document = {"benchmark": self.benchmark, "rows": [asdict(row) for row in self.rows]}
            json_path.write_text(json.dumps(document, indent=1) + "\n")


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The parser every benchmark starts from: it has `--json FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=None, help="also write the rows to this file")
    return parser


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
