"""NORMAL engines, and pairs without a protocol between them, over one tiny model that is loaded once."""

import random
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.choices import Choices
from engine.drafters import DraftContext, Drafts
from engine.grammars import Grammars
from engine.handover_role import NoHandover
from engine.ipc import AddRequest, RequestOutput
from engine.kv_pool import KVLayout, KVPool
from engine.model.interface import DecoderModel
from engine.model.loader import load_model
from engine.model_runner import IntArray, ModelRunner
from kv_transfer.messages import ChoiceStart
from model_files import ModelConfig, resolve_model
from shared_scheduler import AllocStatus, Batch, EngineType, Scheduler, Sequence
from tests.engine.pair import BLOCK_SIZE, Answer, TestEngine
from wire.sampling import SamplingParams

GATE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Weights that many engines share; each has a pool of its own."""

    model: DecoderModel
    config: ModelConfig

    @classmethod
    def load(cls, checkpoint: Path) -> "TinyModel":
        files = resolve_model(str(checkpoint))
        return cls(load_model(files, "fp32", max_positions=256, num_threads=1), files.config())

    def runner(self, num_blocks: int) -> ModelRunner:
        return ModelRunner(self.model, self.config, self._pool(num_blocks))

    def gated_runner(self, num_blocks: int) -> "GatedRunner":
        return GatedRunner(self.model, self.config, self._pool(num_blocks))

    def _pool(self, num_blocks: int) -> KVPool:
        return KVPool(KVLayout.of(self.config, BLOCK_SIZE), num_blocks)


class GatedRunner(ModelRunner):
    """Runs a step only when the test lets it."""

    def __init__(self, model: DecoderModel, config: ModelConfig, kv_pool: KVPool) -> None:
        super().__init__(model, config, kv_pool)
        self._permits = threading.Semaphore(0)
        self.started = threading.Event()
        """A step is here, waiting for its permission or running."""
        self.error: Exception | None = None
        """Raised instead of running the model."""
        self.kinds = ""
        """P or D for every step that has run."""

    def let_run(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def forward(self, batch: Batch, logit_rows: IntArray | None = None) -> torch.Tensor:
        self.started.set()
        assert self._permits.acquire(timeout=GATE_TIMEOUT_S), "the test never let this step run"
        if self.error is not None:
            raise self.error
        logits = super().forward(batch, logit_rows)
        self.started.clear()
        self.kinds += "P" if batch.is_prompt else "D"
        return logits


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams

    def message(self) -> AddRequest:
        return AddRequest(request_id=self.request_id, prompt_token_ids=self.prompt, sampling=self.sampling)


def some_requests() -> list[Request]:
    """Prompts around the chunk and block sizes; every other one is sampled with a seed of its own."""
    chance = random.Random(7)
    lengths = {1: 9, 3: 24, 4: 12, 7: 20, 9: 5, 16: 23, 25: 16, 30: 22}
    return [
        Request(
            str(i),
            tuple(chance.randrange(3, 128) for _ in range(num_prompt)),
            SamplingParams(
                max_tokens=num_output, temperature=float(i % 2), seed=100 + i, ignore_eos=i % 3 == 0
            ),
        )
        for i, (num_prompt, num_output) in enumerate(lengths.items())
    ]


def normal_engine(runner: ModelRunner, **options: Any) -> TestEngine:
    return TestEngine(EngineType.NORMAL, runner, lambda scheduler, _: NoHandover(scheduler), **options)


def answers_alone(model: TinyModel, requests: Items[Request]) -> dict[str, list[int]]:
    """What each request is answered by itself, synchronously, with all the room it wants."""
    answers: dict[str, list[int]] = {}
    for request in requests:
        alone = normal_engine(model.runner(64))
        alone.engine.add(request.message())
        while not alone.has_ended(request.request_id):
            alone.turn()
        answers[request.request_id] = alone.answers[request.request_id].token_ids
    return answers


@dataclass(frozen=True, slots=True)
class ToldDrafter:
    """Drafts from known answers; the first `num_right` of each step are right."""

    answers: dict[str, list[int]]
    num_right: int

    def propose(self, contexts: Items[DraftContext], num_tokens: int) -> list[Drafts]:
        return [self._propose(context, num_tokens) for context in contexts]

    def _propose(self, context: DraftContext, num_tokens: int) -> Drafts:
        at = context.sequence.num_output_tokens
        if context.in_flight is not None:
            at += len(context.in_flight) + 1
        ids = self.answers[context.sequence.request_id][at : at + num_tokens]
        return Drafts(
            tuple(token if i < self.num_right else (token + 1) % 128 for i, token in enumerate(ids))
        )


@dataclass(frozen=True, slots=True)
class DirectOffer:
    first_tokens: tuple[ChoiceStart, ...]
    blocks: torch.Tensor
    """A copy of what was in them when they were announced."""
    release: Callable[[], None]


class DirectSource(NoHandover):
    """PROMPT role: the blocks of a finished prompt are read at the very moment they are announced."""

    def __init__(
        self, scheduler: Scheduler, choices: Choices, pool: KVPool, offers: dict[str, DirectOffer]
    ) -> None:
        super().__init__(scheduler)
        self._choices = choices
        self._pool = pool
        self._offers = offers

    def after_step(self, prompts_done: Items[Sequence], ended: Items[Sequence]) -> None:
        for sequence in prompts_done:
            self._offers[sequence.request_id] = DirectOffer(
                self._choices.starts(sequence),
                self._pool.tensor[torch.from_numpy(sequence.cache.block_table).long()],
                partial(self._scheduler.release_handover, sequence),
            )


class DirectSink(NoHandover):
    """COMPLETION role: takes over what is offered as soon as there is room for it."""

    def __init__(
        self, scheduler: Scheduler, choices: Choices, pool: KVPool, offers: dict[str, DirectOffer]
    ) -> None:
        super().__init__(scheduler)
        self._choices = choices
        self._pool = pool
        self._offers = offers
        self._expected: dict[str, Sequence] = {}

    def start(self, request: AddRequest, sequence: Sequence, now_s: float) -> None:
        self._expected[request.request_id] = sequence

    def abort(self, request_id: str, *, keeps_handover: bool = False) -> None:
        super().abort(request_id)
        self._expected.pop(request_id, None)

    def poll(self, now_s: float) -> Items[RequestOutput]:
        for request_id, offer in list(self._offers.items()):
            sequence = self._expected.get(request_id)
            if sequence is not None:
                if self._scheduler.reserve_remote(sequence, now_s) is not AllocStatus.OK:
                    break
                self._pool.tensor[torch.from_numpy(sequence.cache.block_table).long()] = offer.blocks
                self._choices.admit(sequence, offer.first_tokens, now_s)
                del self._expected[request_id]
            del self._offers[request_id]
            offer.release()
        return ()


class DirectPair:
    """Both engines without a protocol between them: the same turns in every run."""

    def __init__(
        self,
        prompt_runner: ModelRunner,
        completion_runner: ModelRunner,
        *,
        overlap: bool,
        grammars: Grammars | None = None,
        **drafting: Any,
    ) -> None:
        """`drafting`: options of the completion engine."""
        self._offers: dict[str, DirectOffer] = {}
        self.prompt = TestEngine(
            EngineType.PROMPT,
            prompt_runner,
            lambda *parts: DirectSource(*parts, prompt_runner.kv_pool, self._offers),
            overlap=overlap,
            grammars=grammars,
        )
        self.completion = TestEngine(
            EngineType.COMPLETION,
            completion_runner,
            lambda *parts: DirectSink(*parts, completion_runner.kv_pool, self._offers),
            overlap=overlap,
            grammars=grammars,
            **drafting,
        )

    @property
    def engines(self) -> tuple[TestEngine, TestEngine]:
        return self.prompt, self.completion

    def add(self, message: AddRequest) -> None:
        for side in self.engines:
            side.engine.add(message)

    def abort(self, request_id: str) -> None:
        for side in self.engines:
            side.engine.abort(request_id)

    def turn(self) -> None:
        for side in self.engines:
            side.turn()

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    @property
    def is_drained(self) -> bool:
        return not self._offers and all(side.is_drained and not side.engine.has_work for side in self.engines)

    def answer(self, request_id: str) -> Answer:
        """Both engines' outputs as one answer."""
        whole = Answer()
        for side in self.engines:
            part = side.answers.get(request_id, Answer())
            whole.token_ids += part.token_ids
            whole.indices += part.indices
            whole.end = part.end or whole.end
        return whole

    def close(self) -> None:
        for side in self.engines:
            side.engine.close()
