"""Models with per-sequence states through one engine and through the pair: blocks and slot move together."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.hf.parts import StateBatch
from engine.hf.runner import TransformersRunner
from engine.ipc import AddRequest
from engine.model_runner import IntArray
from tests.engine.hf_families import FAMILIES, TinyForeign
from tests.engine.pair import CHUNK, EnginePair, TestEngine, answer_id, engine_pair, greedy
from tests.engine.tiny_engine import normal_engine
from wire.sampling import SamplingParams

NUM_TOKENS = 6


@pytest.fixture(params=["lfm2", "qwen3_next", "deepseek_v4"], scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyForeign:
    return TinyForeign.make(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> TinyForeign:
    return TinyForeign.make(tmp_path_factory.mktemp("tiny"), "lfm2")


def random_prompts(*lengths: int) -> dict[str, list[int]]:
    chance = random.Random(len(lengths))
    return {str(i): [chance.randrange(3, 128) for _ in range(length)] for i, length in enumerate(lengths)}


PROMPTS = random_prompts(1, 3, CHUNK, CHUNK + 1, 3 * CHUNK + 1)


def with_slots(tiny: TinyForeign, *counts: int) -> Callable[[int], TransformersRunner]:
    """Makes a runner with each of these numbers of slots in turn."""
    remaining = iter(counts)
    return lambda num_blocks: tiny.runner(num_blocks, next(remaining))


def run_normal(
    engine: TestEngine, prompts: dict[str, list[int]], sampling: SamplingParams, n: int = 1
) -> None:
    for request_id, prompt in prompts.items():
        engine.engine.add(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                num_completions=n,
            )
        )
    while engine.engine.has_work:
        engine.turn()
    engine.engine.close()


def run_pair(pair: EnginePair, prompts: dict[str, list[int]], sampling: SamplingParams, n: int = 1) -> None:
    for request_id, prompt in prompts.items():
        pair.add(request_id, prompt, sampling, n)
    pair.run_until(lambda: all(pair.completion.has_ended(r) for r in prompts), "all answers")


@pytest.mark.parametrize("overlap", [False, True])
def test_one_engine_answers_what_generate_does(lfm2: TinyForeign, overlap: bool) -> None:
    engine = normal_engine(lfm2.runner(64), overlap=overlap)
    run_normal(engine, PROMPTS, greedy(NUM_TOKENS))
    answers = {request_id: answer.token_ids for request_id, answer in engine.answers.items()}
    assert answers == {r: lfm2.generate(prompt, NUM_TOKENS) for r, prompt in PROMPTS.items()}
    assert engine.is_drained


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pair_answers_what_generate_does(tmp_path: Path, name: str) -> None:
    """Every architecture; those without states move blocks alone."""
    assert_pair_is_generate(TinyForeign.make(tmp_path, name), overlap=False)


def test_the_pair_answers_what_generate_does_with_results_one_step_late(tiny: TinyForeign) -> None:
    assert_pair_is_generate(tiny, overlap=True)


def assert_pair_is_generate(tiny: TinyForeign, *, overlap: bool) -> None:
    with engine_pair(tiny.checkpoint, make_runner=tiny.runner, overlap=overlap) as pair:
        run_pair(pair, PROMPTS, greedy(NUM_TOKENS))
        answers = {request_id: pair.answer(request_id) for request_id in PROMPTS}
        assert answers == {r: tiny.generate(prompt, NUM_TOKENS) for r, prompt in PROMPTS.items()}
        pair.run_until_drained()


class WatchedRunner(TransformersRunner):
    """Keeps what the state pool held before each step."""

    @classmethod
    def of(cls, tiny: TinyForeign, num_slots: int) -> "WatchedRunner":
        plain, injected = tiny.runner(64, num_slots), tiny.injected
        watched = cls(injected.model, injected.config, injected.shape, plain.kv_pool, plain.states)
        watched.before = []
        return watched

    before: list[torch.Tensor]

    def forward(self, batch: StateBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        assert self.states is not None
        self.before.append(self.states.rows.clone())
        return super().forward(batch, logit_rows)


def test_the_slot_that_arrives_is_the_slot_that_was_left(tiny: TinyForeign) -> None:
    prompt_runner, completion_runner = tiny.runner(64), WatchedRunner.of(tiny, 5)
    runners = iter((prompt_runner, completion_runner))
    with engine_pair(tiny.checkpoint, make_runner=lambda _: next(runners)) as pair:
        run_pair(pair, {"a": PROMPTS["4"]}, greedy(NUM_TOKENS))
        assert prompt_runner.states is not None
        (left,) = (row for row in prompt_runner.states.rows if row.any())
        (arrived,) = (row for row in completion_runner.before[0] if row.any())
        assert arrived.equal(left)
        pair.run_until_drained()


def test_requests_that_find_no_slot_wait_although_there_are_blocks(lfm2: TinyForeign) -> None:
    prompts = random_prompts(*[CHUNK + 3] * 6)
    with engine_pair(lfm2.checkpoint, make_runner=with_slots(lfm2, 3, 2)) as pair:
        run_pair(pair, prompts, greedy(NUM_TOKENS))
        assert pair.completion.fewest_free_slots == 0
        assert pair.completion.fewest_free_blocks > 40
        for request_id, prompt in prompts.items():
            assert pair.answer(request_id) == lfm2.generate(prompt, NUM_TOKENS)
        pair.run_until_drained()


def test_forks_clone_the_state_and_go_their_own_ways(tiny: TinyForeign) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=11, ignore_eos=True)
    with engine_pair(tiny.checkpoint, make_runner=tiny.runner, overlap=True) as pair:
        run_pair(pair, {"a": PROMPTS["3"]}, sampling, n=3)
        choices = [pair.answer("a", choice) for choice in range(3)]
        assert choices == [sampled_alone(tiny, PROMPTS["3"], sampling.of_choice(i)) for i in range(3)]
        assert len({tuple(choice) for choice in choices}) == 3
        pair.run_until_drained()


def test_forks_in_one_engine_are_what_each_choice_is_alone(lfm2: TinyForeign) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=11, ignore_eos=True)
    engine = normal_engine(lfm2.runner(64), overlap=True)
    run_normal(engine, {"a": PROMPTS["4"]}, sampling, n=3)
    for choice in range(3):
        alone = sampled_alone(lfm2, PROMPTS["4"], sampling.of_choice(choice))
        assert engine.answers[answer_id("a", choice)].token_ids == alone
    assert engine.is_drained


def sampled_alone(tiny: TinyForeign, prompt: list[int], sampling: SamplingParams) -> list[int]:
    engine = normal_engine(tiny.runner(64))
    run_normal(engine, {"alone": prompt}, sampling)
    return engine.answers["alone"].token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_starts_again_from_a_zeroed_slot(lfm2: TinyForeign, overlap: bool) -> None:
    prompts = random_prompts(*[10] * 3)
    engine = normal_engine(lfm2.runner(10, 4), overlap=overlap, stop_preempted_request=False)
    run_normal(engine, prompts, greedy(14))
    assert engine.engine.stats().num_prompt_tokens > 3 * 10, "nothing was computed twice"
    for request_id, prompt in prompts.items():
        assert engine.answers[request_id].token_ids == lfm2.generate(prompt, 14)
    assert engine.is_drained


def test_a_reused_slot_is_zeroed_before_its_first_step(lfm2: TinyForeign) -> None:
    runner = WatchedRunner.of(lfm2, 2)
    run_normal(normal_engine(runner), {"first": PROMPTS["4"]}, greedy(2))
    num_steps = len(runner.before)
    engine = normal_engine(runner)
    run_normal(engine, {"second": PROMPTS["3"]}, greedy(NUM_TOKENS))
    assert runner.before[num_steps - 1].any()
    assert not runner.before[num_steps].any()
    assert engine.answers["second"].token_ids == lfm2.generate(PROMPTS["3"], NUM_TOKENS)


@pytest.mark.parametrize("name", ["lfm2", "deepseek_v4"])
def test_a_conversation_with_a_warm_pair_is_what_generate_makes_of_every_turn(
    tmp_path: Path, name: str
) -> None:
    """Prompts start from kept states; blocks that the completion engine has are not pulled again."""
    tiny = TinyForeign.make(tmp_path, name)
    history = PROMPTS["4"]
    with engine_pair(
        tiny.checkpoint, make_runner=tiny.runner, prompt_cache=True, completion_cache=True
    ) as pair:
        for turn in ("a", "b", "c"):
            run_pair(pair, {turn: history}, greedy(NUM_TOKENS))
            assert pair.answer(turn) == tiny.generate(history, NUM_TOKENS)
            history = history + pair.answer(turn) + [9, 8, 7]
        assert pair.prompt.scheduler.cache_stats().num_hit_tokens >= 24 + 32
        assert pair.completion.engine.stats().transfer["blocks_skipped"] >= 6 + 8
        pair.run_until_drained()


@pytest.mark.parametrize("num_turns", [1, 3, 6])
def test_an_aborted_request_gives_its_slots_back(lfm2: TinyForeign, num_turns: int) -> None:
    prompts = {"a": PROMPTS["4"], "b": PROMPTS["3"]}
    with engine_pair(lfm2.checkpoint, make_runner=lfm2.runner) as pair:
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(NUM_TOKENS))
        for _ in range(num_turns):
            pair.prompt.turn()
            pair.completion.turn()
        pair.prompt.engine.abort("a")
        pair.completion.engine.abort("a")
        pair.run_until(lambda: pair.completion.has_ended("b"), "the other answer")
        assert pair.answer("b") == lfm2.generate(prompts["b"], NUM_TOKENS)
        pair.run_until_drained()
