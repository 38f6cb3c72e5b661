"""Conversations whose prompts are partly cached are answered as if nothing were."""

from pathlib import Path

import pytest

from engine.ipc import AddRequest
from tests.engine.hf_families import TinyForeign
from tests.engine.pair import EnginePair, TestEngine, engine_pair, greedy, tiny_checkpoint
from tests.engine.tiny_engine import TinyModel, normal_engine
from wire.sampling import SamplingParams

SYSTEM = [7, 3, 9, 4, 60, 61, 62, 63, 11, 12]
SAID = {
    "a": [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29], [30, 31, 32]],
    "b": [[20, 21, 40], [41, 42], [43, 44, 45, 46, 47, 48, 49, 50, 51], [52]],
}
NUM_TURNS = 4
WARM_SAMPLING = SamplingParams(max_tokens=7, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TinyModel:
    return TinyModel.load(checkpoint)


def ask(
    engine: TestEngine, request_id: str, prompt: list[int], sampling: SamplingParams, salt: str = ""
) -> None:
    message = AddRequest(
        request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt
    )
    engine.engine.add(message)


def run(engine: TestEngine, *request_ids: str) -> None:
    while not all(engine.has_ended(request_id) for request_id in request_ids):
        engine.turn()


def converse(engine: TestEngine, sampling: SamplingParams) -> dict[str, list[int]]:
    """All turns of both conversations, turn by turn; the last prompt and answer of each."""
    texts = {name: list(SYSTEM) for name in SAID}
    for turn in range(NUM_TURNS):
        for name, said in SAID.items():
            texts[name] += said[turn]
            ask(engine, f"{name}{turn}", texts[name], sampling)
        run(engine, *(f"{name}{turn}" for name in SAID))
        for name in SAID:
            texts[name] += engine.answers[f"{name}{turn}"].token_ids
    return texts


@pytest.mark.parametrize("sampling", [greedy(6), WARM_SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"num_draft_tokens": 3}], ids=["plain", "overlap", "drafts"]
)
def test_a_conversation_on_a_warm_engine_equals_one_on_a_cold_engine(
    model: TinyModel, sampling: SamplingParams, options: dict[str, object]
) -> None:
    cold = normal_engine(model.runner(64))
    warm = normal_engine(model.runner(64), prefix_cache=True, **options)
    assert converse(warm, sampling) == converse(cold, sampling)
    assert warm.scheduler.cache_stats().num_hit_tokens > 150
    assert cold.scheduler.cache_stats().num_hit_tokens == 0
    assert warm.is_drained
    warm.engine.close()


def test_a_conversation_survives_a_pool_that_holds_little_more_than_itself(model: TinyModel) -> None:
    cold, warm = (
        normal_engine(model.runner(64)),
        normal_engine(model.runner(18), prefix_cache=True, max_num_seqs=1),
    )
    assert converse(warm, greedy(6)) == converse(cold, greedy(6))
    assert warm.scheduler.cache_stats().num_evicted_blocks > 0


def test_the_cached_tokens_of_a_prompt_are_reported_and_not_computed(model: TinyModel) -> None:
    """Failure case P6."""
    engine = normal_engine(model.runner(64), prefix_cache=True)
    prompt = [*SYSTEM, *range(30, 40)]
    ask(engine, "cold", prompt, greedy(4))
    run(engine, "cold")
    num_computed = engine.engine.stats().num_prompt_tokens
    ask(engine, "warm", prompt, greedy(4))
    run(engine, "warm")
    end = engine.answers["warm"].end
    assert end is not None
    assert end.num_cached_tokens == 16
    assert engine.engine.stats().num_prompt_tokens - num_computed == 4
    assert engine.answers["warm"].token_ids == engine.answers["cold"].token_ids


@pytest.mark.parametrize(("family", "overlap"), [("lfm2", False), ("qwen3_5", True), ("qwen3_next", True)])
def test_a_conversation_with_a_model_that_keeps_states_starts_from_copies_of_them(
    tmp_path: Path, family: str, overlap: bool
) -> None:
    tiny = TinyForeign.make(tmp_path, family)
    warm = normal_engine(tiny.runner(64), prefix_cache=True, overlap=overlap)
    assert converse(warm, greedy(6)) == converse(normal_engine(tiny.runner(64)), greedy(6))
    stats = warm.scheduler.cache_stats()
    assert stats.num_hit_tokens > stats.num_query_tokens // 3
    warm.engine.close()


def test_requests_of_different_salts_compute_for_themselves(model: TinyModel) -> None:
    engine = normal_engine(model.runner(64), prefix_cache=True)
    for name, salt in {"mine": "a", "yours": "b"}.items():
        ask(engine, name, [*SYSTEM, 30, 31], greedy(4), salt)
        run(engine, name)
    assert engine.scheduler.cache_stats().num_hit_tokens == 0


def converse_through(pair: EnginePair) -> dict[str, list[int]]:
    texts = {name: list(SYSTEM) for name in SAID}
    for turn in range(NUM_TURNS):
        for name, said in SAID.items():
            request_id = f"{name}{turn}"
            texts[name] += said[turn]
            pair.add(request_id, texts[name], greedy(6))
            pair.run_until(lambda asked=request_id: pair.completion.has_ended(asked), "the answer ends")
            texts[name] += pair.answer(request_id)
    pair.run_until_drained()
    return texts


def test_a_conversation_through_a_pair_equals_one_on_a_cold_engine(
    checkpoint: Path, model: TinyModel
) -> None:
    cold = converse(normal_engine(model.runner(64)), greedy(6))
    with engine_pair(checkpoint, prompt_cache=True, completion_cache=True) as pair:
        assert converse_through(pair) == cold
        assert pair.prompt.scheduler.cache_stats().num_hit_tokens > 60
        assert pair.completion.scheduler.cache_stats().num_cached_blocks > 0
