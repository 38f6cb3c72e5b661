"""A NORMAL engine whose pool is too small computes preempted sequences again: the same tokens."""

import random
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.errors import EngineStartError
from tests.engine.pair import greedy, tiny_checkpoint
from tests.engine.tiny_engine import Request, TinyModel, answers_alone, normal_engine
from wire.sampling import SamplingParams

NUM_PROMPT, NUM_OUTPUT = 20, 28
SMALL_POOL = 22
"""Blocks, the null block included: five prompts fit, fewer than two whole answers do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def requests(sampling: SamplingParams) -> list[Request]:
    chance = random.Random(3)
    return [
        Request(
            str(i),
            tuple(chance.randrange(3, 128) for _ in range(NUM_PROMPT)),
            replace(sampling, seed=i),
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [greedy(NUM_OUTPUT), SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.0, ignore_eos=True)],
    ids=["greedy", "seeded"],
)
def test_recomputed_answers_are_those_of_a_large_pool(
    model: TinyModel, sampling: SamplingParams, overlap: bool
) -> None:
    load = requests(sampling)
    normal = normal_engine(model.runner(SMALL_POOL), overlap=overlap, stop_preempted_request=False)
    for request in load:
        normal.engine.add(request.message())
    while normal.engine.has_work:
        normal.turn()
    answers = {request_id: answer.token_ids for request_id, answer in normal.answers.items()}
    assert answers == answers_alone(model, load)
    assert normal.is_drained
    stats = normal.engine.stats()
    assert stats.num_preempted == 0
    assert stats.num_prompt_tokens > len(load) * NUM_PROMPT, "nothing was computed twice"
    normal.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_survive_forced_retraction(model: TinyModel, overlap: bool) -> None:
    """A large pool, but every third decode step the cheapest sequence is put back and computed again."""
    load = requests(greedy(NUM_OUTPUT))
    normal = normal_engine(
        model.runner(100),
        overlap=overlap,
        stop_preempted_request=False,
        retract_cheapest=True,
        test_retract_interval=3,
    )
    for request in load:
        normal.engine.add(request.message())
    while normal.engine.has_work:
        normal.turn()
    answers = {request_id: answer.token_ids for request_id, answer in normal.answers.items()}
    assert answers == answers_alone(model, load)
    assert normal.is_drained
    assert normal.engine.stats().num_prompt_tokens > 2 * len(load) * NUM_PROMPT, (
        "hardly anything was retracted"
    )
    normal.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_without_recompute_a_preempted_request_ends_and_says_so(model: TinyModel, overlap: bool) -> None:
    load = requests(greedy(NUM_OUTPUT))
    normal = normal_engine(model.runner(SMALL_POOL), overlap=overlap)
    for request in load:
        normal.engine.add(request.message())
    while normal.engine.has_work:
        normal.turn()
    expected = answers_alone(model, load)
    reasons = []
    for request_id, answer in normal.answers.items():
        assert answer.end is not None
        reasons.append(answer.end.finish_reason)
        assert answer.token_ids == expected[request_id][: len(answer.token_ids)]
    assert set(reasons) == {"length", "insufficient_system_resource"}
    assert normal.engine.stats().num_preempted == reasons.count("insufficient_system_resource")
    normal.engine.close()


def test_a_completion_engine_refuses_to_recompute_before_anything_is_loaded() -> None:
    config = EngineConfig(
        role="completion",
        engine_id="e",
        epoch=1,
        model="no-such-model",
        stop_preempted_request=False,
        command_endpoint="",
        event_endpoint="",
    )
    with pytest.raises(EngineStartError, match="--no-stop-preempted-request"):
        config.check()
    replace(config, role="normal").check()
