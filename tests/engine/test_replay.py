"""A completion that was begun elsewhere goes on here as if it had never moved."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.ipc import AddRequest
from tests.engine.pair import BLOCK_SIZE, CHUNK, Answer, EnginePair, engine_pair, greedy, tiny_checkpoint
from tests.engine.tiny_engine import TinyModel, normal_engine
from wire.sampling import SamplingParams

NUM_OUTPUT = 10
SAMPLED = SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.0, seed=3, ignore_eos=True)
BOTH_KINDS = pytest.mark.parametrize("sampling", [greedy(NUM_OUTPUT), SAMPLED], ids=["greedy", "seeded"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TinyModel:
    return TinyModel.load(checkpoint)


def prompt_of(length: int) -> tuple[int, ...]:
    chance = random.Random(length)
    return tuple(chance.randrange(3, 128) for _ in range(length))


def continued(
    name: str, prompt: tuple[int, ...], answer: list[int], num_replayed: int, sampling: SamplingParams
) -> AddRequest:
    """The request that asks for the rest of `answer` after its first `num_replayed` tokens."""
    return AddRequest(
        request_id=name,
        prompt_token_ids=(*prompt, *answer[:num_replayed]),
        sampling=sampling,
        num_replayed_tokens=num_replayed,
    )


def undisturbed(model: TinyModel, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return run_normal(model, AddRequest(request_id="u", prompt_token_ids=prompt, sampling=sampling)).token_ids


def run_normal(model: TinyModel, request: AddRequest) -> Answer:
    normal = normal_engine(model.runner(64))
    normal.engine.add(request)
    while not normal.has_ended(request.request_id):
        normal.turn()
    normal.engine.close()
    return normal.answers[request.request_id]


@BOTH_KINDS
@pytest.mark.parametrize("num_prompt", [1, BLOCK_SIZE, CHUNK - 1, 2 * CHUNK + 1])
def test_a_normal_engine_goes_on_with_the_same_tokens_and_indices(
    model: TinyModel, sampling: SamplingParams, num_prompt: int
) -> None:
    prompt = prompt_of(num_prompt)
    whole = undisturbed(model, prompt, sampling)
    for num_replayed in range(1, NUM_OUTPUT):
        rest = run_normal(model, continued("r", prompt, whole, num_replayed, sampling))
        assert rest.indices == list(range(num_replayed, NUM_OUTPUT))
        assert rest.token_ids == whole[num_replayed:]
        assert rest.end is not None
        assert rest.end.finish_reason == "length"


def add_to_both(pair: EnginePair, request: AddRequest) -> None:
    handover_id = f"handover-{request.request_id}"
    pair.prompt.engine.add(msgspec.structs.replace(request, handover_id=handover_id))
    pair.completion.engine.add(
        msgspec.structs.replace(request, handover_id=handover_id, prompt_engine=pair.address)
    )


@BOTH_KINDS
@pytest.mark.parametrize("num_prompt", [1, BLOCK_SIZE - 1, CHUNK, 2 * CHUNK + 1])
def test_a_pair_goes_on_with_the_same_tokens_and_indices(
    checkpoint: Path, model: TinyModel, sampling: SamplingParams, num_prompt: int
) -> None:
    prompt = prompt_of(num_prompt)
    whole = undisturbed(model, prompt, sampling)
    counts = range(1, NUM_OUTPUT - 1)
    with engine_pair(checkpoint, prompt_blocks=128, completion_blocks=128) as pair:
        for num_replayed in counts:
            add_to_both(pair, continued(str(num_replayed), prompt, whole, num_replayed, sampling))
        pair.run_until(lambda: pair.completion.ended == set(map(str, counts)), "all answers")
        for num_replayed in counts:
            first = pair.prompt.answers[str(num_replayed)]
            rest = pair.completion.answers[str(num_replayed)]
            assert first.indices + rest.indices == list(range(num_replayed, NUM_OUTPUT))
            assert first.token_ids + rest.token_ids == whole[num_replayed:]
        pair.run_until_drained()


def test_the_last_token_is_generated_by_the_prompt_engine_alone(checkpoint: Path, model: TinyModel) -> None:
    prompt = prompt_of(CHUNK)
    whole = undisturbed(model, prompt, SAMPLED)
    with engine_pair(checkpoint) as pair:
        add_to_both(pair, continued("a", prompt, whole, NUM_OUTPUT - 1, SAMPLED))
        pair.run_until(lambda: pair.completion.has_ended("a"), "the completion leg is told")
        answer = pair.prompt.answers["a"]
        assert (answer.token_ids, answer.indices) == (whole[-1:], [NUM_OUTPUT - 1])
        assert answer.end is not None
        assert answer.end.finish_reason == "length"
        pair.run_until_drained()


def test_stop_tokens_end_a_continued_completion_where_they_would_have(model: TinyModel) -> None:
    prompt = prompt_of(9)
    whole = undisturbed(model, prompt, SAMPLED)
    sampling = replace(SAMPLED, stop_token_ids=(whole[6],))
    expected = undisturbed(model, prompt, sampling)
    rest = run_normal(model, continued("r", prompt, whole, 3, sampling))
    assert rest.token_ids == expected[3:]
    assert rest.end is not None
    assert rest.end.finish_reason == "stop"


def test_a_choice_of_several_goes_on_as_a_request_of_its_own(model: TinyModel) -> None:
    prompt = prompt_of(9)
    normal = normal_engine(model.runner(64))
    normal.engine.add(
        AddRequest(request_id="n", prompt_token_ids=prompt, sampling=SAMPLED, num_completions=3)
    )
    while not normal.has_ended("n"):
        normal.turn()
    whole = normal.answers["n/2"].token_ids
    rest = run_normal(model, continued("r", prompt, whole, 4, SAMPLED.of_choice(2)))
    assert rest.token_ids == whole[4:]
    normal.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_continued_completions_share_steps_with_new_ones(model: TinyModel, overlap: bool) -> None:
    prompts = {str(length): prompt_of(length) for length in (3, 9, 17, 24)}
    expected = {name: undisturbed(model, prompt, SAMPLED) for name, prompt in prompts.items()}
    normal = normal_engine(model.runner(128), overlap=overlap)
    for count, (name, prompt) in enumerate(prompts.items()):
        normal.engine.add(continued(name, prompt, expected[name], count * 2, SAMPLED))
    while normal.engine.has_work:
        normal.turn()
    for count, name in enumerate(prompts):
        assert normal.answers[name].token_ids == expected[name][count * 2 :]
    assert normal.is_drained
    normal.engine.close()
