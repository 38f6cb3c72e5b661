"""A prompt and a completion engine in this process: tiny random model, real protocol, fake transport."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.assembly import regions_of
from engine.choices import Choices
from engine.completion_role import ArrivalLimits, CompletionHandover
from engine.drafters import Drafter, PromptLookup
from engine.grammars import Grammars
from engine.handover_role import HandoverRole, NoHandover
from engine.ipc import AddRequest, RequestOutput
from engine.lending import Lender
from engine.llm_engine import LLMEngine
from engine.model_runner import Runner, load_model_runner
from engine.prompt_role import PromptHandover
from engine.pull_back import PullBack, PullBackLimits
from engine.sampler import Sampler
from kv_transfer import HandoverSink, HandoverSource, Identity, TransferSettings
from kv_transfer.transports.fake import FakeTransport
from model_files import resolve_model
from shared_scheduler import EngineType, Scheduler, SchedulerConfig
from tests.engine.builders import save_tiny_model
from wire.sampling import SamplingParams
from wire.services import CompletionEngineAddress, OutputToken, PromptEngineAddress

BLOCK_SIZE = 4
CHUNK = 8
EOS = 2
DEADLINE_S = 30.0
LEASE_S = 5.0
LIMITS = ArrivalLimits(wait_s=20.0, room_wait_s=20.0, share=0.5)


def tiny_checkpoint(path: Path) -> Path:
    save_tiny_model(path, "Llama", max_position_embeddings=256)
    return path


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Answer:
    """What came out of one engine for one choice of a request."""

    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    end: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.end is None, f"output after the end: {output}"
        self.token_ids += [token.token_id for token in output.tokens]
        self.indices += [token.index for token in output.tokens]
        self.tokens += output.tokens
        if output.finish_reason is not None or output.failure is not None:
            self.end = output


def answer_id(request_id: str, choice: int = 0) -> str:
    return request_id if choice == 0 else f"{request_id}/{choice}"


class TestEngine:
    """An engine with its scheduler in reach."""

    __test__ = False

    def __init__(
        self,
        kind: EngineType,
        runner: Runner,
        make_role: Callable[[Scheduler, Choices], HandoverRole],
        *,
        max_num_seqs: int = 8,
        overlap: bool = False,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        grammars: Grammars | None = None,
        block_size: int = BLOCK_SIZE,
        clock: Callable[[], float] = time.monotonic,
        **scheduler_options: Any,
    ) -> None:
        """`num_draft_tokens` without a `drafter`: prompt lookup. Other options are the scheduler's."""
        self.scheduler = Scheduler(
            SchedulerConfig(
                engine_type=kind,
                block_size=block_size,
                num_blocks=runner.kv_pool.num_blocks,
                num_state_slots=None if runner.states is None else runner.states.num_slots,
                sliding_window=runner.sliding_window,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=CHUNK,
                max_model_len=min(200, (runner.kv_pool.num_blocks - 1) * block_size),
                eos_token_ids=(EOS,),
                remote_growth_tokens=8,
                max_num_draft_tokens=num_draft_tokens,
                partial_pulls=kind is EngineType.COMPLETION,
                **scheduler_options,
            )
        )
        self.choices = Choices(self.scheduler)
        self.role = make_role(self.scheduler, self.choices)
        if num_draft_tokens and drafter is None:
            drafter = PromptLookup(self.scheduler.config.num_draft_slots)
        self.engine = LLMEngine(
            self.scheduler,
            runner,
            Sampler(),
            self.role,
            clock,
            choices=self.choices,
            overlap=overlap,
            drafter=drafter if num_draft_tokens else None,
            grammars=grammars,
        )
        self.answers: dict[str, Answer] = {}
        """By `answer_id`."""
        self.num_cached: dict[str, int] = {}
        """Prompt tokens found cached, by request."""
        self.ended: set[str] = set()
        """Requests whose last output is out."""
        self.fewest_free_blocks = self.scheduler.num_free_blocks
        self.fewest_free_slots = self.scheduler.num_free_slots or 0

    def turn(self) -> None:
        """One turn of the engine's loop."""
        outputs = list(self.engine.poll())
        if self.engine.has_work:
            outputs += self.engine.step()
        for output in outputs:
            assert output.request_id not in self.ended, f"output after the last: {output}"
            self.answers.setdefault(answer_id(output.request_id, output.choice), Answer()).take(output)
            if output.tokens:
                self.num_cached[output.request_id] = output.num_cached_tokens
            if output.is_last:
                self.ended.add(output.request_id)
        self.fewest_free_blocks = min(self.fewest_free_blocks, self.scheduler.num_free_blocks)
        self.fewest_free_slots = min(self.fewest_free_slots, self.scheduler.num_free_slots or 0)
        self.scheduler.check_invariants()
        self.choices.check_invariants()

    def has_ended(self, request_id: str) -> bool:
        return request_id in self.ended

    @property
    def is_drained(self) -> bool:
        scheduler = self.scheduler
        return (
            scheduler.num_free_blocks == scheduler.num_usable_blocks
            and scheduler.num_free_slots == scheduler.num_usable_slots
        )


class EnginePair:
    """Both engines; `run_until` turns them, waiting only for the transfer threads."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        prompt_blocks: int = 64,
        completion_blocks: int = 64,
        overlap: bool = False,
        make_runner: Callable[[int], Runner] | None = None,
        chunk_handover: bool = True,
        limits: ArrivalLimits = LIMITS,
        prompt_cache: bool = False,
        completion_cache: bool = False,
        completion_block_size: int = BLOCK_SIZE,
        verify_kv: bool = False,
        prompt_clock: Callable[[], float] = time.monotonic,
        source_clock: Callable[[], float] = time.monotonic,
        admission_estimate: bool = False,
        pull_back: PullBackLimits | None = None,
    ) -> None:
        """`make_runner`: from the number of blocks; None loads the checkpoint."""
        make_runner = make_runner or partial(tiny_runner, checkpoint)
        self._woken = threading.Event()
        identity = Identity("p-engine", 1, {"block_size": str(BLOCK_SIZE)})
        settings = TransferSettings(lease_s=LEASE_S, verify_kv=verify_kv)
        prompt_runner = make_runner(prompt_blocks)
        if completion_block_size == BLOCK_SIZE:
            completion_runner = make_runner(completion_blocks)
        else:
            completion_runner = tiny_runner(checkpoint, completion_blocks, completion_block_size)
        self.transport = FakeTransport()
        self._source = HandoverSource(
            identity,
            regions_of(prompt_runner),
            FakeTransport(),
            "tcp://127.0.0.1:0",
            settings,
            self._woken.set,
            clock=source_clock,
        )
        sink_identity = Identity("d-engine", 1, {"block_size": str(completion_block_size)})
        self._sink = HandoverSink(
            sink_identity, regions_of(completion_runner), self.transport, settings, self._woken.set
        )
        self.fetching_transport = FakeTransport()
        """Of the prompt engine, which reads from the completion engine's cache."""
        fetching: HandoverSink | None = None
        lending: HandoverSource | None = None
        self.lending: HandoverSource | None = None
        self.lender_address: CompletionEngineAddress | None = None
        if pull_back is not None:
            fetching = HandoverSink(
                identity, regions_of(prompt_runner), self.fetching_transport, settings, self._woken.set
            )
            lending = HandoverSource(
                sink_identity,
                regions_of(completion_runner),
                FakeTransport(),
                "tcp://127.0.0.1:0",
                settings,
                self._woken.set,
            )
            self.lending = lending
            self.lender_address = CompletionEngineAddress(
                engine_id="d-engine", epoch=1, control_address=lending.control_address
            )
        self.prompt = TestEngine(
            EngineType.PROMPT,
            prompt_runner,
            lambda scheduler, choices: PromptHandover(
                scheduler,
                self._source,
                choices,
                announces_chunks=chunk_handover,
                pull_back=None
                if fetching is None or pull_back is None
                else PullBack(scheduler, fetching, pull_back),
            ),
            overlap=overlap,
            clock=prompt_clock,
            prefix_cache=prompt_cache,
        )
        self.completion = TestEngine(
            EngineType.COMPLETION,
            completion_runner,
            lambda scheduler, choices: CompletionHandover(
                scheduler,
                self._sink,
                choices,
                limits,
                None if lending is None else Lender(scheduler, lending),
                vocab_size=completion_runner.config.vocab_size,
            ),
            overlap=overlap,
            prefix_cache=completion_cache,
            block_size=completion_block_size,
            admission_estimate=admission_estimate,
        )
        self.address = PromptEngineAddress(
            engine_id="p-engine", epoch=1, control_address=self._source.control_address
        )

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams, n: int = 1) -> None:
        """Both legs, as the proxy starts them."""
        self.add_prompt(request_id, prompt, sampling, n)
        self.add_completion(request_id, prompt, sampling, n)

    def add_prompt(self, request_id: str, prompt: list[int], sampling: SamplingParams, n: int = 1) -> None:
        self.prompt.engine.add(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                num_completions=n,
                handover_id=f"handover-{request_id}",
                previous_engine=self.lender_address,
            )
        )

    def add_completion(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        n: int = 1,
        handover_id: str | None = None,
    ) -> None:
        self.completion.engine.add(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                num_completions=n,
                handover_id=handover_id or f"handover-{request_id}",
                prompt_engine=self.address,
            )
        )

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:g} s: {what}"
            self._woken.clear()
            self.prompt.turn()
            self.completion.turn()
            if not (self.prompt.engine.has_work or self.completion.engine.has_work):
                self._woken.wait(0.01)

    def run_completion_until(self, condition: Callable[[], bool], what: str) -> None:
        """While the prompt engine stands still."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:g} s: {what}"
            self._woken.clear()
            self.completion.turn()
            self._woken.wait(0.01)

    def run_until_drained(self) -> None:
        self.run_until(lambda: self.prompt.is_drained and self.completion.is_drained, "all blocks are free")

    def answer(self, request_id: str, choice: int = 0) -> list[int]:
        """The whole answer: the prompt engine's token and the completion engine's."""
        name = answer_id(request_id, choice)
        first, rest = self.prompt.answers[name], self.completion.answers.get(name, Answer())
        assert first.indices + rest.indices == list(range(len(first.indices) + len(rest.indices)))
        return first.token_ids + rest.token_ids

    def close(self) -> None:
        self.completion.engine.close()
        self.prompt.engine.close()


@contextmanager
def engine_pair(checkpoint: Path, **options: Any) -> Iterator[EnginePair]:
    pair = EnginePair(checkpoint, **options)
    try:
        yield pair
    finally:
        pair.close()


def run_normal(
    checkpoint: Path, prompts: dict[str, list[int]], sampling: SamplingParams
) -> dict[str, list[int]]:
    """What one NORMAL engine answers."""
    normal = TestEngine(
        EngineType.NORMAL, tiny_runner(checkpoint, 256), lambda scheduler, _: NoHandover(scheduler)
    )
    for request_id, prompt in prompts.items():
        request = AddRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)
        normal.engine.add(request)
    while not all(normal.has_ended(request_id) for request_id in prompts):
        normal.turn()
    return {request_id: normal.answers[request_id].token_ids for request_id in prompts}


def tiny_runner(checkpoint: Path, num_blocks: int, block_size: int = BLOCK_SIZE) -> Runner:
    files = resolve_model(str(checkpoint))
    config = files.config()
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    return load_model_runner(
        files,
        weight_format="fp32",
        block_size=block_size,
        kv_bytes=num_blocks * block_size * token_bytes,
        num_threads=1,
    )
