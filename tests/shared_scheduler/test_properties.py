"""The invariants of the scheduler's contract, section 11, over random histories.

`TANDEM_HYPOTHESIS=soak` runs a hundred times as many.
"""

from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler import EngineType
from tests.shared_scheduler.histories import configs, histories, run_life


@given(configs(EngineType.NORMAL), histories, st.booleans())
def test_normal_engine_keeps_every_invariant(config, history, overlapped) -> None:
    run_life(config, history, overlapped)


@given(configs(EngineType.PROMPT), histories, st.booleans())
def test_prompt_engine_keeps_every_invariant(config, history, overlapped) -> None:
    run_life(config, history, overlapped)


@given(configs(EngineType.COMPLETION), histories, st.booleans())
def test_completion_engine_keeps_every_invariant(config, history, overlapped) -> None:
    run_life(config, history, overlapped)
