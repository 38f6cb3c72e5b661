"""docs/failure-tests.md names every statement once and only tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failure-tests.md").read_text()


def test_every_named_test_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - defined == set()


@pytest.mark.parametrize(("kind", "count"), [("T", 20), ("P", 9), ("R", 14)])
def test_every_statement_has_its_row(kind: str, count: int) -> None:
    rows = re.findall(rf"^\| ({kind}\d+) \|", PAGE, re.MULTILINE)
    assert rows == [f"{kind}{number}" for number in range(1, count + 1)]
