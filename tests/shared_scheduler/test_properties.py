"""The invariants of the scheduler's contract, section 11, over random lives.

After every step: the books of both pools and all queues agree, no block has two owners unless shared, every
write lands in an own block, positions are computed once and in order, cuts are aligned, nobody is overtaken.
At the end: every request ended exactly once with the tokens an undisturbed run gives, everything is free.
Half of the lives hand in results one step late. `TANDEM_HYPOTHESIS=soak` runs a hundred times as many.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler import EngineType, SchedulerConfig
from tests.shared_scheduler.builders import EOS
from tests.shared_scheduler.histories import (
    IMAGE_PAD,
    IMAGE_START,
    busy_history,
    configs,
    examples,
    histories,
    run_life,
)

ENGINES = pytest.mark.parametrize("engine_type", EngineType)


@ENGINES
@examples(60)
@given(data=st.data(), history=histories, overlapped=st.booleans())
def test_short_lives_keep_every_invariant(engine_type, data, history, overlapped) -> None:
    run_life(data.draw(configs(engine_type)), history, overlapped)


@ENGINES
@examples(40)
@given(data=st.data(), seed=st.integers(0, 2**32), overlapped=st.booleans())
def test_busy_lives_keep_every_invariant(engine_type, data, seed, overlapped) -> None:
    run_life(data.draw(configs(engine_type)), busy_history(seed), overlapped)


def test_waiting_and_prompted_forks_do_not_wait_for_each_other() -> None:
    """A life that stood still: forks in both queues had pinned every block."""
    config = SchedulerConfig(
        engine_type=EngineType.NORMAL,
        block_size=3,
        num_blocks=6,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=32,
        prefill_attempt_interval=3,
        prefill_any_attempt_interval=3,
        eos_token_ids=(EOS,),
        max_num_draft_tokens=3,
        image_pad_token_id=IMAGE_PAD,
        image_start_token_id=IMAGE_START,
    )
    run_life(config, busy_history(885733), overlapped=False)
