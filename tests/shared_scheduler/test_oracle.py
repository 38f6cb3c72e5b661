"""Every decision of the reference scheduler, step by step (`preempt_only_on_need` off)."""

import os
from pathlib import Path

import pytest

from tests.shared_scheduler.oracle import History, Replay, read_histories

SUBSET = Path(__file__).parents[1] / "data" / "oracle" / "deepinfer_decisions.jsonl.gz"
ALL = os.environ.get("TANDEM_ORACLE_DIR")


def seed_of(history: History) -> str:
    return f"seed{history['config']['seed']}"


@pytest.mark.parametrize("history", list(read_histories(SUBSET)), ids=seed_of)
def test_recorded_history_is_reproduced(history: History) -> None:
    Replay(history).run()


@pytest.mark.skipif(
    ALL is None,
    reason="TANDEM_ORACLE_DIR not set: only the 7 histories in tests/data were replayed, not all 100",
)
def test_all_recorded_histories_are_reproduced() -> None:
    histories = list(read_histories(Path(ALL or "") / SUBSET.name))
    assert len(histories) == 100
    for history in histories:
        Replay(history).run()
