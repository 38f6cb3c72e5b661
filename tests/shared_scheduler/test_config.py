import pytest

from shared_scheduler import ConfigError, EngineType
from tests.shared_scheduler.builders import config

CONTRADICTIONS = [
    (
        {"max_num_batched_tokens": 16, "chunked_prefill": False},
        r"16 .*max_model_len=32 .*chunked_prefill=True",
    ),
    (
        {"engine_type": EngineType.COMPLETION, "stop_preempted_request": False},
        r"completion .*stop_preempted_request=False.* set stop_preempted_request=True",
    ),
    ({"num_state_slots": 0}, r"num_state_slots=0 .*stateful"),
    ({"num_state_slots": 1}, r"num_state_slots=1 .*stateful"),
    ({"num_state_slots": 4, "max_num_draft_tokens": 2}, "max_num_draft_tokens=2 .*num_state_slots=4"),
    ({"prefill_attempt_interval": 0}, r"prefill_attempt_interval must be at least 1, got 0"),
    ({"prefill_any_attempt_interval": -1}, r"prefill_any_attempt_interval must be at least 1, got -1"),
    ({"block_size": 0}, r"block_size must be at least 1, got 0"),
    ({"num_blocks": 1}, r"num_blocks .*got 1"),
    ({"lookahead_tokens": 40}, r"max_num_batched_tokens=32 .*lookahead_tokens=40"),
    ({"max_num_batched_tokens": 7, "cp_size": 4}, r"max_num_batched_tokens=7 .*aligned to 8 .*cp_size=4"),
    ({"prefill_watermark": 0.0}, r"prefill_watermark .*got 0"),
    ({"prefill_max_sum_seqlen_k": 0}, r"prefill_max_sum_seqlen_k .*got 0"),
    ({"image_start_token_id": 5}, r"image_start_token_id=5 without image_pad_token_id"),
    (
        {"runtime_max_model_len": 33, "max_num_draft_tokens": 2},
        r"runtime_max_model_len=33 .*max_model_len=32 .*max_num_draft_tokens=2",
    ),
    ({"max_num_draft_tokens": -1}, r"max_num_draft_tokens must be at least 0, got -1"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS, ids=[str(c) for c, _ in CONTRADICTIONS])
def test_an_impossible_configuration_names_what_contradicts(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_alignment_is_two_tokens_per_context_parallel_rank() -> None:
    assert config().cut_alignment == 1
    assert config(cp_size=4).cut_alignment == 8


def test_prompts_are_limited_by_the_budget_only_without_chunks() -> None:
    assert config(max_num_batched_tokens=8).prompt_limit == 32
    assert config(max_num_batched_tokens=64, chunked_prefill=False).prompt_limit == 32


def test_the_digest_ignores_pool_sizes_and_nothing_else() -> None:
    assert config(num_blocks=20).digest() == config(num_blocks=30).digest()
    assert config(num_state_slots=4).digest() == config().digest()
    assert config(max_num_seqs=5).digest() != config().digest()
    assert config(prefill_attempt_interval=2).digest() != config().digest()


def test_the_digest_is_the_same_everywhere() -> None:
    """A literal: ranks on other machines and Python versions must compute it too."""
    assert config().digest() == 2240570148031670234
