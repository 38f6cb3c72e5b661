"""The pair answers as one engine does, whatever is aborted or short of room; nothing stays pinned."""

import random
import time
from pathlib import Path

import pytest

from engine.assembly import regions_of
from kv_transfer import HandoverSink, Identity, TransferSettings
from kv_transfer.events import Offered, SinkEvent
from kv_transfer.transports.fake import FakeTransport
from tests.engine.pair import (
    BLOCK_SIZE,
    CHUNK,
    LEASE_S,
    EnginePair,
    engine_pair,
    greedy,
    run_normal,
    tiny_checkpoint,
    tiny_runner,
)
from tests.kv_transfer.ends import Inbox
from wire.sampling import SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def random_prompts(*lengths: int) -> dict[str, list[int]]:
    chance = random.Random(len(lengths))
    return {str(i): [chance.randrange(3, 128) for _ in range(length)] for i, length in enumerate(lengths)}


def ended(pair: EnginePair, *request_ids: str) -> bool:
    return all(pair.completion.has_ended(request_id) for request_id in request_ids)


@pytest.mark.parametrize(
    "sampling", [greedy(6), SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)]
)
def test_pair_answers_as_one_engine_at_every_chunking(checkpoint: Path, sampling: SamplingParams) -> None:
    prompts = random_prompts(1, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1)
    with engine_pair(checkpoint) as pair:
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, sampling)
        pair.run_until(lambda: ended(pair, *prompts), "all answers")
        assert {r: pair.answer(r) for r in prompts} == run_normal(checkpoint, prompts, sampling)
        pair.run_until_drained()


def test_one_token_asked_for_ends_on_the_prompt_engine_and_withdraws_the_handover(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add("a", [5, 6, 7], greedy(1))
        pair.run_until(lambda: ended(pair, "a"), "the completion leg ends")
        end = pair.completion.answers["a"].end
        assert end is not None
        assert end.finish_reason == "handover_withdrawn"
        assert len(pair.answer("a")) == 1
        pair.run_until_drained()


@pytest.mark.parametrize("num_turns", range(0, 14, 2))
@pytest.mark.parametrize("legs", ["prompt", "completion", "both"])
def test_aborting_either_leg_at_any_time_pins_nothing_and_changes_no_other_answer(
    checkpoint: Path, legs: str, num_turns: int
) -> None:
    prompts = random_prompts(3 * CHUNK, 2 * CHUNK + 1)
    expected = run_normal(checkpoint, prompts, greedy(8))
    with engine_pair(checkpoint) as pair:
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(8))
        for _ in range(num_turns):
            pair.prompt.turn()
            pair.completion.turn()
        if legs != "completion":
            pair.prompt.engine.abort("0")
        if legs != "prompt":
            pair.completion.engine.abort("0")
        pair.run_until(lambda: ended(pair, "1"), "the other request's answer")
        assert pair.answer("1") == expected["1"]
        # As the proxy does: what is left of a request whose other leg has ended is aborted.
        pair.completion.engine.abort("0")
        pair.run_until_drained()


def test_a_completion_engine_without_room_serves_one_after_the_other(checkpoint: Path) -> None:
    """E3, T6: requests that wait for room hold nothing there, and their hand-overs stay valid."""
    prompts = random_prompts(*[5 * CHUNK] * 6)
    with engine_pair(checkpoint, prompt_blocks=128, completion_blocks=20) as pair:
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(5))
        pair.run_until(lambda: ended(pair, *prompts), "all answers")
        assert {r: pair.answer(r) for r in prompts} == run_normal(checkpoint, prompts, greedy(5))
        pair.run_until_drained()


def test_a_prompt_larger_than_the_completion_pool_is_refused_and_pins_nothing(checkpoint: Path) -> None:
    with engine_pair(checkpoint, completion_blocks=6) as pair:
        pair.add("a", list(range(3, 3 + 30)), greedy(4))
        pair.run_until(lambda: ended(pair, "a"), "the refusal")
        end = pair.completion.answers["a"].end
        assert end is not None
        assert end.failure is not None
        assert end.failure.status == 400
        assert "--kv-bytes" in end.failure.error.message
        pair.run_until_drained()


def test_a_read_that_fails_gives_an_error_and_no_token(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.transport.next_error = "injected"
        pair.add("a", [5, 6, 7, 8, 9], greedy(4))
        pair.run_until(lambda: ended(pair, "a"), "the failure")
        answer = pair.completion.answers["a"]
        assert answer.end is not None
        assert answer.end.failure is not None
        assert answer.token_ids == []
        pair.run_until_drained()


def test_a_stalled_read_keeps_its_blocks_until_it_is_fenced(checkpoint: Path) -> None:
    """T15: blocks that a read may still write to are not given to anyone."""
    with engine_pair(checkpoint, completion_blocks=16) as pair:
        pair.transport.stalled = True
        pair.add("a", list(range(3, 3 + 20)), greedy(4))
        pair.run_until(lambda: not pair.completion.is_drained, "blocks are reserved")
        pair.completion.engine.abort("a")
        for _ in range(20):
            pair.prompt.turn()
            pair.completion.turn()
        assert not pair.completion.is_drained
        pair.transport.stalled = False
        pair.run_until_drained()


@pytest.mark.parametrize("stage", ["asked", "reading"])
def test_a_handover_that_a_live_reader_leaves_is_taken_by_the_next_and_computed_once(
    checkpoint: Path, stage: str
) -> None:
    prompt = list(range(3, 3 + 20))
    with engine_pair(checkpoint) as pair:
        pair.transport.stalled = True
        pair.add("a", prompt, greedy(4))
        if stage == "reading":
            pair.run_until(lambda: pair.transport.num_reads > 0, "it is read")
        pair.completion.engine.abort("a", keeps_handover=True)
        pair.transport.stalled = False
        pair.run_until(lambda: "a" in pair.prompt.answers and pair.completion.is_drained, "it is left")
        pair.add_completion("b", prompt, greedy(4), handover_id="handover-a")
        pair.run_until(lambda: pair.completion.has_ended("b"), "the answer")
        answer = pair.prompt.answers["a"].token_ids + pair.completion.answers["b"].token_ids
        assert {"a": answer} == run_normal(checkpoint, {"a": prompt}, greedy(4))
        assert pair.prompt.engine.stats().num_prompt_tokens == len(prompt)
        pair.run_until_drained()


def test_a_handover_that_a_client_leaves_gives_its_blocks_back_at_once(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.transport.stalled = True
        pair.add("a", list(range(3, 3 + 20)), greedy(4))
        pair.run_until(lambda: pair.transport.num_reads > 0, "it is read")
        pair.completion.engine.abort("a", keeps_handover=True)
        pair.prompt.engine.withdraw("handover-a")  # as its proxy does
        pair.transport.stalled = False
        began_s = time.monotonic()
        pair.run_until_drained()
        assert time.monotonic() - began_s < LEASE_S


def test_a_completion_engine_that_ends_leaves_its_handovers_to_others(checkpoint: Path) -> None:
    inbox: Inbox[SinkEvent] = Inbox()
    with engine_pair(checkpoint) as pair:
        pair.transport.stalled = True
        pair.add("a", list(range(3, 3 + 20)), greedy(4))
        pair.run_until(lambda: pair.prompt.role.num_handovers() == 1, "it is offered")
        pair.completion.engine.close()
        another = HandoverSink(
            Identity("another", 1, {"block_size": str(BLOCK_SIZE)}),
            regions_of(tiny_runner(checkpoint, 64)),
            FakeTransport(),
            TransferSettings(lease_s=LEASE_S),
            inbox.wake,
        )
        another.request("handover-a", pair.address)
        assert inbox.next(another.events, LEASE_S) == Offered("handover-a", 20, 5)
        another.close()


def test_a_request_id_is_in_use_while_a_read_may_write_for_it(checkpoint: Path) -> None:
    with engine_pair(checkpoint, completion_blocks=24) as pair:
        pair.transport.stalled = True
        pair.add("a", list(range(3, 3 + 20)), greedy(4))
        pair.run_until(lambda: not pair.completion.is_drained, "blocks are reserved")
        pair.completion.engine.abort("a")
        pair.add_completion("a", [8, 9, 10], greedy(3), handover_id="handover-b")
        (refusal,) = pair.completion.engine.poll()
        assert refusal.failure is not None
        assert "'a' is in use" in refusal.failure.error.message
        pair.transport.stalled = False
        pair.run_until_drained()


def test_a_handover_id_in_use_is_refused_and_the_first_request_goes_on(checkpoint: Path) -> None:
    expected = run_normal(checkpoint, {"a": [5, 6, 7]}, greedy(3))
    with engine_pair(checkpoint) as pair:
        pair.add("a", [5, 6, 7], greedy(3))
        for add, engine in (
            (pair.add_prompt, pair.prompt.engine),
            (pair.add_completion, pair.completion.engine),
        ):
            add("a", [5, 6, 7], greedy(3))
            (refusal,) = engine.poll()
            assert refusal.failure is not None
            assert refusal.failure.status == 400
            assert "'handover-a' is in use" in refusal.failure.error.message
        pair.run_until(lambda: ended(pair, "a"), "the first one's answer")
        assert pair.answer("a") == expected["a"]
        pair.run_until_drained()


def test_a_prompt_whose_client_left_before_it_was_scheduled_is_swept(checkpoint: Path) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add("a", [5, 6, 7], greedy(3))
        pair.prompt.engine.abort("a")
        pair.run_until(lambda: ended(pair, "a"), "the completion leg is told")
        assert pair.prompt.answers["a"].token_ids == []
        pair.run_until_drained()
