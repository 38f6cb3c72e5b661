"""Engines of several real processes: the same answers as one, and a clean end when a process is lost."""

import os
import signal
import time
from pathlib import Path

import pytest

from engine.errors import EngineStartError
from shared_scheduler import GroupError
from tests.engine.native_build import require_kernels
from tests.engine.pair import greedy, run_normal
from tests.engine.tensor_parallel.engines import DEADLINE_S, Engine, engine, tiny_checkpoint

PROMPTS = {"a": [5, 9, 70, 33, 4, 18, 99, 23, 6], "b": [7, 8, 7, 8, 7, 8], "c": list(range(30, 61))}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "Llama")


def rank_pids(one: Engine) -> tuple[int, ...]:
    ranks = one.engine.ranks
    assert ranks is not None
    return ranks.process_ids


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_two_ranks_answer_as_one_engine_does(checkpoint: Path) -> None:
    expected = run_normal(checkpoint, PROMPTS, greedy(16))
    require_kernels()
    with engine(checkpoint, tp=2, kernels="native", overlap=True, speculative="ngram") as one:
        pids = rank_pids(one)
        assert one.ready.kernels == "native"
        for name, prompt in PROMPTS.items():
            one.add(name, prompt, greedy(16))
        answers = one.run_until_ended(*(f"{name}/0" for name in PROMPTS))
        assert {name: answers[f"{name}/0"] for name in PROMPTS} == expected
        # The same again, from the prefix cache, and three choices that share the prompt's blocks.
        one.add("again", PROMPTS["c"], greedy(16))
        one.add("forked", PROMPTS["c"], greedy(16), num_completions=3)
        answers = one.run_until_ended("again/0", "forked/0", "forked/1", "forked/2")
        assert set(map(tuple, answers.values())) == {tuple(expected["c"])}
        assert one.engine.stats().num_cache_hit_tokens > 0
    assert len(pids) == 1
    assert is_gone(pids[0])


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_rank_that_dies_takes_its_engine_down(checkpoint: Path, is_busy: bool) -> None:
    with engine(checkpoint, tp=2) as one:
        (pid,) = rank_pids(one)
        if is_busy:
            one.add("a", PROMPTS["a"], greedy(200))
            one.turn()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 1 of the engine has ended with code -9"):
            turn_until_it_breaks(one, is_busy)


def turn_until_it_breaks(one: Engine, is_busy: bool) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        assert is_busy or one.woken.wait(DEADLINE_S), "nobody noticed"
        one.turn()


def test_a_rank_that_stops_answering_ends_the_engine_within_its_time_limit(checkpoint: Path) -> None:
    with engine(checkpoint, tp=2, tp_timeout_s=5.0) as one:
        (pid,) = rank_pids(one)
        one.add("a", PROMPTS["a"], greedy(8))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match=r"a rank of --tp 2 is lost or silent .*5000ms"):
            one.run_until_ended("a/0")
    assert is_gone(pid)


def test_what_cannot_be_shared_out_is_refused_at_start(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"--tp 4 does not divide num_heads 6"):
        Engine(checkpoint, tp=4)
    with pytest.raises(EngineStartError, match="--dtype q4 needs the native kernels"):
        Engine(checkpoint, tp=2, dtype="q4", kernels="torch")
    odd = tiny_checkpoint(tmp_path / "odd", "Llama", intermediate_size=72)
    require_kernels()
    with pytest.raises(
        EngineStartError, match="need a multiple of 8 as intermediate_size, not 36; --kernels t"
    ):
        Engine(odd, tp=2, kernels="native")
    narrow = tiny_checkpoint(tmp_path / "narrow", "Llama", intermediate_size=96)
    with pytest.raises(EngineStartError, match="--dtype q4 has groups of 32 weights, and --tp 2 gives"):
        Engine(narrow, tp=2, dtype="q4")
    tiny_checkpoint(tmp_path, "Gemma3", num_key_value_heads=2)
    with pytest.raises(EngineStartError, match=r"--tp 2: .* is computed by the transformers package"):
        Engine(tmp_path, tp=2)
