"""Several choices of one prompt: each is answered as a request of its own, the prompt is computed once."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc import AddRequest
from kv_transfer.messages import ChoiceStart
from tests.engine.pair import (
    BLOCK_SIZE,
    CHUNK,
    EOS,
    Answer,
    EnginePair,
    TestEngine,
    answer_id,
    engine_pair,
    greedy,
    tiny_checkpoint,
)
from tests.engine.tiny_engine import DirectPair, TinyModel, normal_engine
from wire.sampling import SamplingParams
from wire.services import FinishReason

N = 3
SAMPLED = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
AROUND_BLOCKS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TinyModel:
    return TinyModel.load(checkpoint)


def prompt_of(length: int) -> tuple[int, ...]:
    chance = random.Random(length)
    return tuple(chance.randrange(3, 128) for _ in range(length))


def message(request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, n: int = 1) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, num_completions=n)


def run(engine: TestEngine, *requests: AddRequest) -> None:
    """Serve requests that arrive together, to their ends."""
    for request in requests:
        engine.engine.add(request)
    while engine.engine.has_work:
        engine.turn()
    assert engine.ended == {request.request_id for request in requests}


def alone(model: TinyModel, prompt: tuple[int, ...], sampling: SamplingParams, choice: int) -> Answer:
    """What a request of its own with this choice's seed is answered, with all the room it wants."""
    engine = normal_engine(model.runner(64))
    run(engine, message("alone", prompt, sampling.of_choice(choice)))
    return engine.answers["alone"]


def all_alone(model: TinyModel, prompt: tuple[int, ...], sampling: SamplingParams, n: int) -> list[list[int]]:
    return [alone(model, prompt, sampling, choice).token_ids for choice in range(n)]


def choices_of(engine: TestEngine, request_id: str, n: int) -> list[list[int]]:
    return [engine.answers[answer_id(request_id, choice)].token_ids for choice in range(n)]


def reasons_of(engine: TestEngine, request_id: str, n: int) -> list[FinishReason | None]:
    answers = [engine.answers[answer_id(request_id, choice)] for choice in range(n)]
    return [answer.end and answer.end.finish_reason for answer in answers]


def pair_choices(pair: EnginePair, request_id: str, n: int) -> list[list[int]]:
    return [pair.answer(request_id, choice) for choice in range(n)]


# ----- the same answers as separate requests


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [greedy(6), SAMPLED])
def test_a_normal_engine_answers_each_choice_as_a_request_of_its_own(
    model: TinyModel, sampling: SamplingParams, overlap: bool
) -> None:
    prompts = {str(length): prompt_of(length) for length in AROUND_BLOCKS}
    engine = normal_engine(model.runner(256), overlap=overlap)
    run(engine, *(message(name, prompt, sampling, N) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert choices_of(engine, name, N) == all_alone(model, prompt, sampling, N)
    assert engine.engine.stats().num_prompt_tokens == sum(AROUND_BLOCKS)
    assert engine.engine.stats().num_output_tokens == len(AROUND_BLOCKS) * N * sampling.max_tokens
    assert engine.is_drained
    engine.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [greedy(6), SAMPLED])
def test_a_pair_answers_each_choice_as_a_request_of_its_own(
    checkpoint: Path, model: TinyModel, sampling: SamplingParams, overlap: bool
) -> None:
    prompts = {str(length): prompt_of(length) for length in AROUND_BLOCKS}
    with engine_pair(checkpoint, prompt_blocks=256, completion_blocks=256, overlap=overlap) as pair:
        for name, prompt in prompts.items():
            pair.add(name, list(prompt), sampling, N)
        pair.run_until(lambda: pair.completion.ended == set(prompts), "all answers")
        for name, prompt in prompts.items():
            assert pair_choices(pair, name, N) == all_alone(model, prompt, sampling, N)
        assert pair.prompt.engine.stats().num_prompt_tokens == sum(AROUND_BLOCKS)
        assert pair.prompt.engine.stats().num_output_tokens == len(AROUND_BLOCKS) * N
        pair.run_until_drained()


def test_greedy_choices_are_equal_and_sampled_ones_differ(model: TinyModel) -> None:
    engine = normal_engine(model.runner(64))
    run(engine, message("g", prompt_of(9), greedy(6), 8), message("s", prompt_of(9), SAMPLED, 8))
    assert len({tuple(ids) for ids in choices_of(engine, "g", 8)}) == 1
    assert len({tuple(ids) for ids in choices_of(engine, "s", 8)}) > 4


def test_logprobs_of_every_choice_are_its_own(model: TinyModel) -> None:
    sampling = replace(SAMPLED, logprobs=2)
    reported: dict[int, list[object]] = {choice: [] for choice in range(N)}
    engine = normal_engine(model.runner(64))
    engine.engine.add(message("a", prompt_of(9), sampling, N))
    while engine.engine.has_work:
        for output in engine.engine.step():
            reported[output.choice] += output.tokens
    for choice in range(N):
        tokens: list[object] = []
        engine.engine.add(message(str(choice), prompt_of(9), sampling.of_choice(choice)))
        while engine.engine.has_work:
            tokens += [token for output in engine.engine.step() for token in output.tokens]
        # The same numbers up to the last bit or so: batches of other sizes round differently.
        assert [repr(t)[:60] for t in reported[choice]] == [repr(t)[:60] for t in tokens]


# ----- blocks are shared


def test_the_prompts_blocks_are_held_once_by_all_choices(model: TinyModel) -> None:
    num_prompt_blocks, n = 6, 4
    engine = normal_engine(model.runner(64))
    run(engine, message("a", prompt_of(num_prompt_blocks * BLOCK_SIZE), replace(SAMPLED, max_tokens=5), n))
    num_used = engine.scheduler.num_usable_blocks - engine.fewest_free_blocks
    assert num_used == num_prompt_blocks + n  # 4 of the 5 tokens are written, into one block each


def test_a_partly_filled_tail_block_is_cloned_for_all_but_one(model: TinyModel) -> None:
    num_full_blocks, n = 6, 4
    prompt = prompt_of(num_full_blocks * BLOCK_SIZE + 1)
    engine = normal_engine(model.runner(64))
    run(engine, message("a", prompt, replace(SAMPLED, max_tokens=4), n))
    num_used = engine.scheduler.num_usable_blocks - engine.fewest_free_blocks
    assert num_used == num_full_blocks + n


def test_a_pair_moves_and_holds_the_prompts_blocks_once(checkpoint: Path) -> None:
    num_prompt_blocks, n = 6, 4
    with engine_pair(checkpoint) as pair:
        prompt = list(prompt_of(num_prompt_blocks * BLOCK_SIZE))
        pair.add("a", prompt, replace(SAMPLED, max_tokens=5), n)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the answer")
        assert pair.prompt.scheduler.num_usable_blocks - pair.prompt.fewest_free_blocks == num_prompt_blocks
        held = pair.completion.scheduler.num_usable_blocks - pair.completion.fewest_free_blocks
        assert held == num_prompt_blocks + n
        assert pair.completion.engine.stats().transfer["blocks_read"] == num_prompt_blocks
        pair.run_until_drained()


def test_without_room_for_all_choices_they_decode_one_after_the_other(
    checkpoint: Path, model: TinyModel
) -> None:
    prompt, sampling, n = prompt_of(10 * BLOCK_SIZE), replace(SAMPLED, max_tokens=5), 5
    # Ten blocks for the prompt, and one each for two choices.
    with engine_pair(checkpoint, completion_blocks=13) as pair:
        pair.add("a", list(prompt), sampling, n)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the answer")
        assert pair_choices(pair, "a", n) == all_alone(model, prompt, sampling, n)
        assert pair.completion.fewest_free_blocks == 0
        pair.run_until_drained()


def test_a_choice_that_runs_out_of_blocks_ends_its_request_and_gives_everything_back(
    checkpoint: Path,
) -> None:
    prompt, sampling = list(prompt_of(10 * BLOCK_SIZE)), replace(SAMPLED, max_tokens=40)
    with engine_pair(checkpoint, completion_blocks=16) as pair:
        pair.add("a", prompt, sampling, 5)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the end")
        ends = [answer.end for answer in pair.completion.answers.values() if answer.end is not None]
        assert [end.finish_reason for end in ends] == ["insufficient_system_resource"]
        pair.run_until_drained()


# ----- choices that end with their first token


@dataclass(frozen=True, slots=True)
class Ending:
    """Which choices of a prompt end with their first token."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopped: tuple[int, ...]


def ending(model: TinyModel, *stopped: int) -> Ending:
    """A prompt of which just these of N choices stop at once: their first tokens are stop tokens."""
    for seed in range(1000):
        prompt, sampling = prompt_of(9), replace(SAMPLED, seed=seed, temperature=2.0)
        answers = all_alone(model, prompt, sampling, N)
        stop_ids = {answers[choice][0] for choice in stopped}
        others = [ids for choice, ids in enumerate(answers) if choice not in stopped]
        if not stop_ids & {token_id for ids in others for token_id in ids}:
            return Ending(prompt, replace(sampling, stop_token_ids=tuple(stop_ids)), stopped)
    raise AssertionError("no seed does it")


ENDINGS = [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("stopped", ENDINGS)
def test_choices_that_stop_at_their_first_token_leave_the_others_alone(
    model: TinyModel, stopped: tuple[int, ...]
) -> None:
    case = ending(model, *stopped)
    engine = normal_engine(model.runner(64))
    run(engine, message("a", case.prompt, case.sampling, N))
    assert choices_of(engine, "a", N) == all_alone(model, case.prompt, case.sampling, N)
    assert reasons_of(engine, "a", N) == ["stop" if c in stopped else "length" for c in range(N)]
    assert engine.is_drained


@pytest.mark.parametrize("stopped", ENDINGS)
def test_a_pair_hands_over_only_the_choices_that_go_on(
    checkpoint: Path, model: TinyModel, stopped: tuple[int, ...]
) -> None:
    case = ending(model, *stopped)
    with engine_pair(checkpoint) as pair:
        pair.add("a", list(case.prompt), case.sampling, N)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the answer")
        assert pair_choices(pair, "a", N) == all_alone(model, case.prompt, case.sampling, N)
        assert reasons_of(pair.prompt, "a", N) == ["stop" if c in stopped else None for c in range(N)]
        assert pair.prompt.has_ended("a") == (len(stopped) == N)
        if len(stopped) == N:
            assert reasons_of(pair.completion, "a", 1) == ["handover_withdrawn"]
        pair.run_until_drained()


def test_one_token_asked_for_ends_every_choice_on_the_prompt_engine(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add("a", [5, 6, 7], replace(SAMPLED, max_tokens=1), N)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the completion leg ends")
        assert reasons_of(pair.prompt, "a", N) == ["length"] * N
        assert all(len(ids) == 1 for ids in pair_choices(pair, "a", N))
        pair.run_until_drained()


def test_eos_ends_its_choice_alone(model: TinyModel) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=2.0, seed=1)
    engine = normal_engine(model.runner(256))
    run(engine, message("a", prompt_of(5), sampling, 8))
    answers = choices_of(engine, "a", 8)
    assert answers == all_alone(model, prompt_of(5), sampling, 8)
    assert len({len(ids) for ids in answers}) > 1
    expected = ["stop" if ids[-1] == EOS else "length" for ids in answers]
    assert reasons_of(engine, "a", 8) == expected


# ----- aborts, withdrawals, bad input


@pytest.mark.parametrize("num_turns", range(0, 14, 2))
@pytest.mark.parametrize("legs", ["prompt", "completion", "both"])
def test_aborting_either_leg_at_any_time_ends_all_choices_and_pins_nothing(
    checkpoint: Path, model: TinyModel, legs: str, num_turns: int
) -> None:
    prompt = prompt_of(2 * CHUNK + 1)
    with engine_pair(checkpoint) as pair:
        for request_id in ("gone", "stays"):
            pair.add(request_id, list(prompt), SAMPLED, N)
        for _ in range(num_turns):
            pair.prompt.turn()
            pair.completion.turn()
        if legs != "completion":
            pair.prompt.engine.abort("gone")
        if legs != "prompt":
            pair.completion.engine.abort("gone")
        pair.run_until(lambda: pair.completion.has_ended("stays"), "the other request's answer")
        assert pair_choices(pair, "stays", N) == all_alone(model, prompt, SAMPLED, N)
        pair.completion.engine.abort("gone")
        pair.run_until_drained()


def prefilled(pair: EnginePair) -> Callable[[], bool]:
    return lambda: pair.prompt.engine.stats().num_handovers == 1


def test_a_withdrawn_handover_gives_its_blocks_back_at_once(checkpoint: Path) -> None:
    """T1: the completion engine was never asked, so nobody else would let go before the lease ends."""
    with engine_pair(checkpoint) as pair:
        pair.add_prompt("a", list(prompt_of(20)), SAMPLED, N)
        pair.run_until(prefilled(pair), "the prompt is computed")
        assert not pair.prompt.is_drained
        for handover_id in ("unknown", "handover-a", "handover-a"):
            pair.prompt.engine.withdraw(handover_id)
        pair.run_until_drained()
        assert pair.prompt.engine.stats().transfer["ends_by_reason_withdrawn"] == 1
        pair.prompt.engine.withdraw("handover-a")


def test_a_handover_withdrawn_in_prefill_ends_the_prompt(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add("a", list(prompt_of(5 * CHUNK)), SAMPLED, N)
        pair.prompt.turn()
        pair.prompt.engine.withdraw("handover-a")
        pair.run_until(lambda: pair.completion.has_ended("a"), "the reader is told")
        assert reasons_of(pair.prompt, "a", 1) == ["abort"]
        assert reasons_of(pair.completion, "a", 1) == ["handover_withdrawn"]
        pair.run_until_drained()


def test_an_abort_that_crosses_the_first_tokens_withdraws_the_handover(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add_prompt("a", list(prompt_of(20)), SAMPLED, N)
        pair.run_until(prefilled(pair), "the prompt is computed")
        pair.prompt.engine.abort("a")
        pair.run_until_drained()


@pytest.mark.parametrize(("offered", "asked"), [(3, 1), (3, 2)])
def test_an_offer_of_choices_that_nobody_asked_for_is_refused(
    checkpoint: Path, offered: int, asked: int
) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add_prompt("a", [5, 6, 7], SAMPLED, offered)
        pair.add_completion("a", [5, 6, 7], SAMPLED, asked)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the refusal")
        end = pair.completion.answers["a"].end
        assert end is not None
        assert end.failure is not None
        assert (end.failure.status, end.failure.error.code) == (409, "handover_mismatch")
        pair.run_until_drained()


def test_a_first_token_outside_the_vocabulary_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_pair(checkpoint) as pair:
        monkeypatch.setattr(pair.prompt.choices, "starts", lambda _: (ChoiceStart(0, 128),))
        pair.add_prompt("a", [5, 6, 7], SAMPLED)
        pair.add_completion("a", [5, 6, 7], SAMPLED)
        pair.run_until(lambda: pair.completion.has_ended("a"), "the refusal")
        end = pair.completion.answers["a"].end
        assert end is not None
        assert end.failure is not None
        assert (end.failure.status, end.failure.error.code) == (409, "handover_mismatch")
        pair.run_until_drained()


def test_ids_that_could_be_a_forks_or_are_in_use_are_refused(model: TinyModel) -> None:
    engine = normal_engine(model.runner(64))
    engine.engine.add(message("a", prompt_of(5), SAMPLED, N))
    for _ in range(3):
        engine.turn()
    for request_id in ("a#1", "a"):
        engine.engine.add(message(request_id, prompt_of(5), SAMPLED, N))
        (refused,) = engine.engine.poll()
        assert refused.is_last
        assert refused.failure is not None
        assert request_id in refused.failure.error.message
    while engine.engine.has_work:
        engine.turn()
    assert choices_of(engine, "a", N) == all_alone(model, prompt_of(5), SAMPLED, N)


# ----- any history


@dataclass(frozen=True, slots=True)
class Arrival:
    turn: int
    length: int
    n: int
    max_tokens: int
    leaves_after: int | None

    def message(self, request_id: str) -> AddRequest:
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=1.0, seed=self.length)
        return message(request_id, prompt_of(self.length), sampling, self.n)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        turn=st.integers(0, 12),
        length=st.sampled_from(AROUND_BLOCKS),
        n=st.integers(1, 4),
        max_tokens=st.sampled_from((1, 2, 9)),
        leaves_after=st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=4,
)


@given(ARRIVALS, st.integers(16, 40), st.booleans())
@settings(max_examples=40)
def test_a_normal_engine_that_recomputes_answers_any_history_as_if_each_choice_were_alone(
    known_answers: "KnownAnswers", arrivals: list[Arrival], num_blocks: int, overlap: bool
) -> None:
    engine = normal_engine(
        known_answers.model.runner(num_blocks), overlap=overlap, stop_preempted_request=False
    )
    turn, last_turn = 0, max(arrival.turn for arrival in arrivals)
    while turn <= last_turn or engine.engine.has_work:
        for number, arrival in enumerate(arrivals):
            if arrival.turn == turn:
                engine.engine.add(arrival.message(str(number)))
            if arrival.leaves_after is not None and arrival.turn + arrival.leaves_after == turn:
                engine.engine.abort(str(number))
        engine.turn()
        turn += 1
        assert turn < 3000, "no progress"
    for number, arrival in enumerate(arrivals):
        for choice in range(arrival.n):
            answer = engine.answers.get(answer_id(str(number), choice), Answer())
            expected = known_answers.of(arrival, choice)
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert arrival.leaves_after is not None or answer.token_ids == expected
    assert engine.is_drained
    engine.engine.close()


@given(ARRIVALS, st.integers(8, 20), st.integers(12, 40), st.booleans())
@settings(max_examples=40)
def test_a_pair_answers_any_history_as_if_each_choice_were_alone_or_says_that_it_had_no_room(
    known_answers: "KnownAnswers",
    arrivals: list[Arrival],
    prompt_blocks: int,
    completion_blocks: int,
    overlap: bool,
) -> None:
    model = known_answers.model
    pair = DirectPair(model.runner(prompt_blocks), model.runner(completion_blocks), overlap=overlap)
    turn, last_turn = 0, max(arrival.turn for arrival in arrivals)
    while turn <= last_turn or not pair.is_drained:
        for number, arrival in enumerate(arrivals):
            if arrival.turn == turn:
                pair.add(arrival.message(str(number)))
            if arrival.leaves_after is not None and arrival.turn + arrival.leaves_after == turn:
                pair.abort(str(number))
        pair.turn()
        turn += 1
        assert turn < 3000, "no progress"
    for number, arrival in enumerate(arrivals):
        answers = [pair.answer(answer_id(str(number), choice)) for choice in range(arrival.n)]
        reasons = {answer.end.finish_reason for answer in answers if answer.end is not None}
        for choice, answer in enumerate(answers):
            expected = known_answers.of(arrival, choice)
            assert answer.indices == list(range(len(answer.indices)))
            assert answer.token_ids == expected[: len(answer.token_ids)]
            is_cut = "insufficient_system_resource" in reasons or arrival.leaves_after is not None
            assert is_cut or answer.token_ids == expected
    pair.close()


class KnownAnswers:
    """Answers of requests alone, each generated once."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model
        self._known: dict[tuple[int, int, int], list[int]] = {}

    def of(self, arrival: Arrival, choice: int) -> list[int]:
        key = (arrival.length, arrival.max_tokens, choice)
        if key not in self._known:
            request = arrival.message("alone")
            answer = alone(self.model, request.prompt_token_ids, request.sampling, choice)
            self._known[key] = answer.token_ids
        return self._known[key]


@pytest.fixture(scope="module")
def known_answers(model: TinyModel) -> KnownAnswers:
    return KnownAnswers(model)
