"""A draft model: what it guesses saves steps, and whatever it guesses changes no answer."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from engine import draft_loading
from engine.draft_loading import load_draft_runner
from engine.draft_model import RETRY_CALLS, DraftModel, GuessRates
from engine.drafters import DraftContext
from engine.errors import EngineStartError
from engine.ipc import AddRequest
from engine.model_runner import ModelRunner
from model_files import resolve_model
from shared_scheduler import Sequence
from tests.engine.builders import save_tiny_model
from tests.engine.native_build import require_kernels
from tests.engine.pair import BLOCK_SIZE, TestEngine, greedy, tiny_checkpoint
from tests.engine.tiny_engine import (
    DirectPair,
    Request,
    TinyModel,
    answers_alone,
    normal_engine,
    some_requests,
)
from wire.sampling import SamplingParams

REQUESTS = some_requests()
LONG = tuple(3 + (5 * i + i * i) % 120 for i in range(30))
GREEDY = Request("greedy", LONG, greedy(21))
SAMPLED = Request("sampled", LONG, SamplingParams(max_tokens=21, temperature=1.0, seed=3, ignore_eos=True))
NUM_DRAFTS = 3


@dataclass(slots=True)
class Times:
    """Nothing is known unless `step_s` is set."""

    step_s: float | None = None

    def predict_decode_s(self, num_sequences: int, num_tokens: int) -> float | None:
        return self.step_s


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Of the same shape, with other weights."""
    path: Path = tmp_path_factory.mktemp("other")
    save_tiny_model(path, "Llama", seed=7, max_position_embeddings=256)
    return TinyModel.load(path)


@pytest.fixture(scope="module")
def answers(model: TinyModel) -> dict[str, list[int]]:
    return answers_alone(model, [*REQUESTS, GREEDY, SAMPLED])


def drafter_of(model: TinyModel, num_blocks: int = 128, times: Times | None = None) -> DraftModel:
    return DraftModel(model.runner(num_blocks), times or Times(), num_slots=17, vocab_size=128, max_len=256)


def run(engine: TestEngine | DirectPair, *requests: Request, n: int = 1) -> None:
    add = engine.add if isinstance(engine, DirectPair) else engine.engine.add
    for request in requests:
        add(replace_n(request.message(), n))
    sides = engine.engines if isinstance(engine, DirectPair) else (engine,)
    while not all(any(side.has_ended(request.request_id) for side in sides) for request in requests):
        engine.turn()


def replace_n(message: AddRequest, n: int) -> AddRequest:
    return AddRequest(
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        sampling=message.sampling,
        num_completions=n,
    )


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=lambda request: request.request_id)
def test_a_model_that_drafts_for_itself_is_always_right(
    model: TinyModel, answers: dict[str, list[int]], request_: Request
) -> None:
    """Sampled, too: it draws with the request's own noise."""
    drafter = drafter_of(model)
    engine = normal_engine(model.runner(64), num_draft_tokens=NUM_DRAFTS, drafter=drafter, clock=lambda: 0.0)
    run(engine, request_)
    drafter.check_invariants()
    assert engine.answers[request_.request_id].token_ids == answers[request_.request_id]
    stats = engine.engine.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens == 15
    assert stats.num_decoded_sequences == 5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_same", [False, True], ids=["other", "same"])
def test_a_batch_is_answered_as_each_request_alone(
    model: TinyModel, other: TinyModel, answers: dict[str, list[int]], is_same: bool, overlap: bool
) -> None:
    drafter = drafter_of(model if is_same else other)
    engine = normal_engine(
        model.runner(128), num_draft_tokens=NUM_DRAFTS, drafter=drafter, overlap=overlap, clock=lambda: 0.0
    )
    requests = [*REQUESTS, GREEDY, SAMPLED]
    run(engine, *requests)
    drafter.check_invariants()
    assert {r.request_id: engine.answers[r.request_id].token_ids for r in requests} == {
        r.request_id: answers[r.request_id] for r in requests
    }
    stats = engine.engine.stats()
    share = stats.num_accepted_tokens / stats.num_drafted_tokens
    assert share > 0.6 if is_same else share < 0.5
    engine.engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_completion_engine_the_draft_model_reads_the_prompt_itself(
    model: TinyModel, answers: dict[str, list[int]], overlap: bool
) -> None:
    drafter = drafter_of(model)
    pair = DirectPair(
        model.runner(64),
        model.runner(64),
        overlap=overlap,
        num_draft_tokens=NUM_DRAFTS,
        drafter=drafter,
        clock=lambda: 0.0,
    )
    run(pair, GREEDY, SAMPLED)
    for request in (GREEDY, SAMPLED):
        assert pair.answer(request.request_id).token_ids == answers[request.request_id]
    assert pair.completion.engine.stats().num_accepted_tokens >= 20
    pair.close()


def test_sequences_that_are_computed_again_and_forks_stay_right(
    model: TinyModel, answers: dict[str, list[int]]
) -> None:
    options = {"stop_preempted_request": False, "retract_cheapest": True, "test_retract_interval": 2}
    engine = normal_engine(
        model.runner(96), num_draft_tokens=2, drafter=drafter_of(model), clock=lambda: 0.0, **options
    )
    run(engine, GREEDY, SAMPLED)
    for request in (GREEDY, SAMPLED):
        assert engine.answers[request.request_id].token_ids == answers[request.request_id]
    plain = normal_engine(model.runner(96))
    drafted = normal_engine(
        model.runner(96), num_draft_tokens=2, drafter=drafter_of(model), clock=lambda: 0.0
    )
    for each in (plain, drafted):
        run(each, SAMPLED, n=3)
    assert {k: a.token_ids for k, a in drafted.answers.items()} == {
        k: a.token_ids for k, a in plain.answers.items()
    }
    assert drafted.engine.stats().num_accepted_tokens > 15


def test_without_room_some_sequences_get_no_drafts(model: TinyModel, answers: dict[str, list[int]]) -> None:
    """Sixteen blocks hold one of the two sequences, whose slot the other one may take later."""
    drafter = drafter_of(model, num_blocks=17)
    engine = normal_engine(model.runner(64), num_draft_tokens=NUM_DRAFTS, drafter=drafter, clock=lambda: 0.0)
    run(engine, GREEDY, SAMPLED)
    run(engine, replace(GREEDY, request_id="later"))
    drafter.check_invariants()
    assert engine.answers["greedy"].token_ids == engine.answers["later"].token_ids == answers["greedy"]
    assert engine.answers["sampled"].token_ids == answers["sampled"]
    assert engine.engine.stats().num_accepted_tokens >= 15


class CostlyRunner(ModelRunner):
    """Each pass takes a second of the test's clock."""

    now_s = 0.0
    num_passes = 0

    def forward(self, batch: object, logit_rows: object = None) -> torch.Tensor:
        type(self).now_s += 1.0
        type(self).num_passes += 1
        return super().forward(batch, logit_rows)  # type: ignore[arg-type]


def test_nothing_is_drafted_where_drafting_costs_more_than_it_saves(model: TinyModel) -> None:
    times = Times()
    CostlyRunner.now_s, CostlyRunner.num_passes = 0.0, 0
    runner = model.runner(64)
    runner.__class__ = CostlyRunner
    drafter = DraftModel(
        runner, times, num_slots=2, vocab_size=128, max_len=256, clock=lambda: CostlyRunner.now_s
    )
    sequence = Sequence("s", LONG, greedy(100), block_size=BLOCK_SIZE)
    sequence.draft.info_slot = 0
    context = DraftContext(sequence)
    assert len(drafter.propose([context], 2)[0].token_ids) == 2
    times.step_s = 0.1
    num_passes = CostlyRunner.num_passes
    proposals = []
    for _ in range(RETRY_CALLS):
        sequence.append_token(5)
        proposals.append(len(drafter.propose([context], 2)[0].token_ids))
    assert proposals == [0] * (RETRY_CALLS - 1) + [1]
    assert CostlyRunner.num_passes == num_passes + 1
    times.step_s = 1000.0
    assert len(drafter.propose([context], 2)[0].token_ids) == 2


def test_rates_follow_what_comes_of_guesses() -> None:
    rates = GuessRates()
    for _ in range(300):
        rates.add(3, True)
        rates.add(0, False)
    assert rates.of([3, 0]) == pytest.approx([1.0, 0.0], abs=0.01)
    assert rates.overall() == pytest.approx(0.5, abs=0.1)


def test_a_model_with_another_tokenizer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(*words: str) -> Any:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        return SimpleNamespace(name="target", tokenizer=lambda: tokenizer)

    monkeypatch.setattr(draft_loading, "resolve_model", lambda name: files("a", "c"))
    config: Any = SimpleNamespace()
    with pytest.raises(EngineStartError, match=r"--draft-model small has another tokenizer .* token 1"):
        draft_loading.load_draft_model(config, "small", files("a", "b"), config, config)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_beside_4_bit_weights_a_draft_model_may_have_others(tmp_path: Path, kernels: str) -> None:
    """What computes it is what `--kernels` says."""
    require_kernels()
    files = resolve_model(str(tiny_checkpoint(tmp_path)))
    config: Any = SimpleNamespace(
        dtype="q4", kernels=kernels, block_size=4, draft_kv_bytes=1 << 20, max_num_seqs=2, num_threads=1
    )
    assert load_draft_runner(config, files, 32).kernels == kernels
