"""Results as lines of JSON: those of a run that ends early stay, and a later run goes on behind them."""

import argparse
import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """What is done. Every new line is printed and, where there is a file, written at once."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.lines: list[Line] = []
        if path is not None and path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, **line: object) -> None:
        self.lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(text + "\n")

    def having(self, **values: object) -> list[Line]:
        """Lines with these values."""
        return [line for line in self.lines if all(line.get(name) == value for name, value in values.items())]


def add_journal_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--journal",
        type=Path,
        default=None,
        help="file of results so far: what it has is not measured again, the report is of all it has",
    )
