"""Random lives of a scheduler: requests, forks, drafts, aborts and late results, checked at every step."""

import os
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shared_scheduler import (
    AllocStatus,
    EngineType,
    Import,
    Loan,
    RequestError,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    Sequence,
    SequenceStatus,
    WaitingPolicy,
)
from tests.shared_scheduler.builders import EOS, UNDISTURBED, VOCABULARY, FakeWorker, next_token
from tests.shared_scheduler.checked_queue import check_heads
from wire.sampling import SamplingParams

SOAK = os.environ.get("TANDEM_HYPOTHESIS") == "soak"


def examples(count: int) -> settings:
    """So many random examples, a hundred times as many with `TANDEM_HYPOTHESIS=soak`."""
    return settings(
        max_examples=100 * count if SOAK else count,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


IMAGE_START, IMAGE_PAD = VOCABULARY, VOCABULARY + 1

CACHELESS_POLICIES = [
    WaitingPolicy.LOF,
    WaitingPolicy.RANDOM,
    WaitingPolicy.ROUTING_KEY,
    WaitingPolicy.PRIORITY,
]

Event = tuple[Any, ...]


@st.composite
def configs(draw: st.DrawFn, engine_type: EngineType, **fixed: Any) -> SchedulerConfig:
    """Small, often cramped configurations."""
    cp_size = draw(st.sampled_from([1, 1, 2]))
    lookahead = draw(st.sampled_from([0, 0, 3]))
    chunked = draw(st.booleans())
    max_model_len = draw(st.integers(6, 40))
    budget = draw(st.integers(8, 48))
    stateful = draw(st.booleans())
    recompute = engine_type is not EngineType.COMPLETION and draw(st.booleans())
    retract = draw(st.booleans())
    prefix_cache = draw(st.booleans())
    policies = [WaitingPolicy.FCFS]
    if engine_type is not EngineType.COMPLETION:
        policies += list(WaitingPolicy) if prefix_cache else CACHELESS_POLICIES
    values: dict[str, Any] = {
        "engine_type": engine_type,
        "block_size": draw(st.sampled_from([1, 3, 4])),
        "num_blocks": draw(st.integers(3, 30)),
        "num_state_slots": draw(st.integers(2, 6)) if stateful else None,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget if chunked else max(budget, max_model_len),
        "max_model_len": max_model_len,
        "chunked_prefill": chunked,
        "stop_preempted_request": not recompute,
        "retract_cheapest": retract,
        "test_retract_interval": draw(st.sampled_from([None, 3])) if retract and recompute else None,
        "prefill_attempt_interval": draw(st.integers(1, 4)),
        "prefill_any_attempt_interval": draw(st.integers(1, 5)),
        "prefill_max_sum_seqlen_k": draw(st.sampled_from([None, None, 30])),
        "lookahead_tokens": lookahead,
        "cp_size": cp_size,
        "eos_token_ids": (EOS,),
        "max_num_draft_tokens": 0 if stateful else draw(st.sampled_from([0, 3])),
        "image_pad_token_id": IMAGE_PAD,
        "image_start_token_id": IMAGE_START,
        "admission_estimate": engine_type is not EngineType.PROMPT and draw(st.booleans()),
        "new_token_ratio_decay_steps": draw(st.sampled_from([1, 20])),
        "max_scored_tokens": draw(st.sampled_from([None, 9])),
        "max_chunk_tokens": draw(st.sampled_from([None, None, 8])) if chunked else None,
        "remote_growth_tokens": draw(st.sampled_from([1, 8])),
        "prefix_cache": prefix_cache,
        "waiting_policy": draw(st.sampled_from(policies)),
        "waiting_age_limit": draw(st.sampled_from([1, 3, 20])),
        "sharing_tokens": draw(st.sampled_from([1, 8])),
        "cache_events": True,
        "state_snapshot_blocks": draw(st.sampled_from([1, 2, 32])),
        "partial_pulls": draw(st.booleans()),
    }
    return SchedulerConfig(**(values | fixed))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Text with, now and then, an image in it."""
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24))
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(tokens)))
        tokens[at:at] = [IMAGE_START, *[IMAGE_PAD] * draw(st.integers(1, 10))]
    return tuple(tokens)


def events() -> st.SearchStrategy[Event]:
    pick = st.integers(0, 7)
    sampling = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 5),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (3,)]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    checkpoints = st.lists(st.integers(1, 20), max_size=2, unique=True).map(
        lambda found: tuple(sorted(found))
    )
    return st.one_of(
        st.tuples(st.just("arrive"), prompts(), sampling, checkpoints, st.integers(0, 5)),
        st.tuples(st.just("arrive"), prompts(), sampling, st.just(()), st.just(1)),
        st.tuples(st.just("turn"), pick, st.integers(0, 40), prompts(), sampling),
        st.tuples(st.just("abort"), pick),
        st.tuples(st.just("lend"), pick, st.integers(0, 3)),
        st.tuples(st.just("import"), pick, st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("return"), st.booleans()),
        st.tuples(st.just("fork"), pick, sampling, st.sampled_from(["copy", "fresh", "own"])),
        st.tuples(st.just("draft"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("unblock"), pick),
        st.tuples(st.just("finish_transfer"), pick),
        st.tuples(st.just("drop"), pick),
    )


histories = st.lists(st.lists(events(), max_size=3), max_size=25)
"""The events before each step."""


def busy_history(seed: int, num_steps: int = 40) -> list[list[Event]]:
    """Many requests at once: what hypothesis, which prefers short examples, seldom draws."""
    chance = Random(seed)
    with_drafts, with_forks, with_aborts, with_turns = (chance.random() < 0.5 for _ in range(4))

    def sampling() -> SamplingParams:
        return SamplingParams(
            max_tokens=chance.randint(1, 20),
            seed=chance.randint(0, 5),
            ignore_eos=chance.random() < 0.5,
            stop_token_ids=chance.choice([(), (), (3,)]),
        )

    def prompt() -> tuple[int, ...]:
        tokens = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 4, 7, 12, 20]))]
        if chance.random() < 0.2:
            at = chance.randint(0, len(tokens))
            tokens[at:at] = [IMAGE_START, *[IMAGE_PAD] * chance.randint(1, 8)]
        return tuple(tokens)

    def happenings() -> Iterator[Event]:
        for _ in range(chance.choice([0, 0, 1, 1, 3])):
            checkpoints = tuple(sorted(chance.sample(range(1, 20), chance.choice([0, 0, 2]))))
            yield "arrive", prompt(), sampling(), checkpoints, chance.randint(0, 20)
            if with_turns:
                yield "turn", chance.randint(0, 40), chance.randint(0, 40), prompt(), sampling()
        if with_turns and chance.random() < 0.2:
            yield "lend", chance.randint(0, 40), chance.randint(0, 3)
            yield "import", chance.randint(0, 40), chance.randint(0, 3), chance.randint(1, 3)
            yield "return", chance.random() < 0.7
        if with_drafts:
            yield "draft", chance.randint(0, 2), chance.randint(0, 3)
        if with_forks and chance.random() < 0.4:
            yield "fork", chance.randint(0, 7), sampling(), chance.choice(["copy", "fresh", "own"])
        if with_aborts and chance.random() < 0.3:
            yield chance.choice(["abort", "abort", "drop"]), chance.randint(0, 7)
        if chance.random() < 0.6:
            yield "finish_transfer", chance.randint(0, 7)
        yield "unblock", chance.randint(0, 7)

    return [list(happenings()) for _ in range(num_steps)]


def chat_history(seed: int, num_steps: int = 12) -> list[list[Event]]:
    """Conversations that go on, begin again from an earlier turn, fork, and are left."""
    chance = Random(seed)
    openings = [tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice([4, 9]))) for _ in range(2)]

    def sampling() -> SamplingParams:
        return SamplingParams(max_tokens=chance.randint(1, 9), seed=chance.randint(0, 2), ignore_eos=True)

    def said() -> tuple[int, ...]:
        return tuple(chance.randrange(4) for _ in range(chance.choice([1, 3, 6])))

    def happenings() -> Iterator[Event]:
        if chance.random() < 0.4:
            yield "arrive", chance.choice(openings) + said(), sampling(), (), 9
        yield "turn", chance.randint(0, 40), chance.choice([8, 16, 99, 99]), said(), sampling()
        if chance.random() < 0.25:
            yield "fork", chance.randint(0, 7), sampling(), chance.choice(["copy", "fresh", "own"])
        if chance.random() < 0.2:
            yield chance.choice(["abort", "drop"]), chance.randint(0, 7)
        if chance.random() < 0.2:
            yield "lend", chance.randint(0, 40), chance.randint(0, 3)
            yield "import", chance.randint(0, 40), chance.randint(0, 3), chance.randint(1, 3)
        if chance.random() < 0.2:
            yield "return", chance.random() < 0.7
        yield "finish_transfer", chance.randint(0, 7)

    return [list(happenings()) for _ in range(num_steps)]


@dataclass(slots=True)
class Expected:
    """What one request must produce if nothing disturbs it."""

    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams

    def outputs(self, max_model_len: int) -> list[int]:
        tokens = list(self.tokens)
        while True:
            tokens.append(next_token(tokens, self.sampling.seed))
            num_outputs = len(tokens) - self.num_prompt_tokens
            is_eos = tokens[-1] == EOS and not self.sampling.ignore_eos
            is_long = len(tokens) > max_model_len or num_outputs >= self.sampling.max_tokens
            if is_eos or tokens[-1] in self.sampling.stop_token_ids or is_long:
                return tokens[self.num_prompt_tokens :]


@dataclass(slots=True)
class Launched:
    """A step that runs: its results are known to the worker, not yet to the scheduler."""

    outputs: SchedulerOutputs
    sampled: list[int]
    accepted: list[int]


@dataclass(slots=True)
class Life:
    """One scheduler with its worker, driven by events; `overlapped` hands results in one step late."""

    config: SchedulerConfig
    overlapped: bool = False
    scheduler: Scheduler = field(init=False)
    worker: FakeWorker = field(init=False)
    live: dict[str, Sequence] = field(default_factory=dict)
    held: dict[str, Sequence] = field(default_factory=dict)
    in_transfer: dict[str, Sequence] = field(default_factory=dict)
    expected: dict[str, Expected] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    all_sequences: dict[str, Sequence] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)
    first_steps: list[int] = field(default_factory=list)
    forked: set[str] = field(default_factory=set)
    without_blocks: set[str] = field(default_factory=set)
    unadmitted_forks: set[str] = field(default_factory=set)
    """Their next chunk is their first, or their first again."""
    admitted: set[str] = field(default_factory=set)
    cached_names: set[str] = field(default_factory=set)
    loans: list[tuple[Loan, list[int], str]] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    """Filled, neither committed nor dropped."""
    launched: Launched | None = None
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        check_heads(self.scheduler)
        self.worker = FakeWorker(self.config)

    # ----- events

    def apply(self, event: Event) -> None:
        kind, *rest = event
        getattr(self, f"_on_{kind}")(*rest)
        self.scheduler.check_invariants()

    def _on_arrive(
        self, prompt: Many[int], sampling: SamplingParams, checkpoints: tuple[int, ...], lottery: int
    ) -> None:
        salt = "" if self.num_requests % 4 else "salt"
        self._add(prompt, sampling, salt, checkpoints, is_schedulable=lottery > 0)

    def _on_turn(self, index: int, num_kept: int, said: Many[int], sampling: SamplingParams) -> None:
        """A prompt that begins like a conversation that was here before."""
        former = self._pick(index, self.all_sequences)
        if former is not None:
            self._add((*former.token_ids[:num_kept], *said), sampling, former.cache_salt)

    def _add(
        self,
        prompt: Many[int],
        sampling: SamplingParams,
        salt: str,
        checkpoints: tuple[int, ...] = (),
        *,
        is_schedulable: bool = True,
    ) -> None:
        is_completion = self.config.engine_type is EngineType.COMPLETION
        s = Sequence(
            str(self.num_requests),
            prompt,
            sampling,
            block_size=self.config.block_size,
            chunk_checkpoints=checkpoints,
            schedulable=is_completion or is_schedulable,
            cache_salt=salt,
            priority=self.num_requests % 3,
            routing_key=("", "a", "b", "c")[self.num_requests % 7 % 4],
        )
        self.num_requests += 1
        if is_completion:
            if self.scheduler.reserve_remote(s, 0.0) is not AllocStatus.OK:
                assert not s.holds_blocks
                return
            self.in_transfer[s.request_id] = s
        else:
            self.scheduler.add_sequence(s, 0.0)
        self._register(s, list(prompt))

    def _register(self, s: Sequence, tokens: list[int]) -> None:
        self.live[s.request_id] = self.all_sequences[s.request_id] = s
        self.expected[s.request_id] = Expected(tokens, s.num_prompt_tokens, s.sampling)

    def _pick(self, index: int, among: dict[str, Sequence]) -> Sequence | None:
        return list(among.values())[index % len(among)] if among else None

    def _on_abort(self, index: int) -> None:
        s = self._pick(index, self.live)
        if s is not None:
            self.scheduler.abort(s.request_id)

    def _on_lend(self, index: int, first_block: int) -> None:
        s = self._pick(index, self.all_sequences)
        if s is None:
            return
        loan = self.scheduler.lend(s.token_ids, s.cache_salt, first_block)
        if loan is not None:
            tokens = s.token_ids[first_block * self.config.block_size : loan.num_tokens]
            self.loans.append((loan, tokens, s.cache_salt))

    def _on_import(self, index: int, first_block: int, num_blocks: int) -> None:
        """What a peer has cached of a conversation arrives here."""
        s, size = self._pick(index, self.all_sequences), self.config.block_size
        end = (first_block + num_blocks) * size
        if s is None or end > s.num_tokens or IMAGE_PAD in s.token_ids[:end]:
            return
        wanted = self.scheduler.reserve_import(s.token_ids, s.cache_salt, first_block, num_blocks)
        if wanted is not None:
            self.worker.fill(wanted.block_ids.tolist(), s.token_ids[first_block * size : end], s.cache_salt)
            self.imports.append(wanted)

    def _on_return(self, is_good: bool) -> None:
        """The oldest loan and the oldest import end."""
        if self.loans:
            loan, tokens, salt = self.loans.pop(0)
            assert self.worker.holds(loan.block_ids.tolist(), tokens, salt), "a lent block was written"
            self.scheduler.give_back(loan)
        if self.imports:
            wanted = self.imports.pop(0)
            (self.scheduler.commit_import if is_good else self.scheduler.drop_import)(wanted)

    def _on_unblock(self, index: int) -> None:
        s = self._pick(index, self.live)
        if s is not None:
            self.scheduler.set_schedulable(s.request_id)

    def _on_fork(self, index: int, sampling: SamplingParams, mode: str) -> None:
        parent = self._pick(index, self.live)
        if parent is None:
            return
        outputs: list[int] | None = None
        if mode == "fresh":
            outputs = []
        elif mode == "own":
            outputs = [next_token(parent.token_ids[: parent.num_prompt_tokens], sampling.seed)]
        child_length = parent.num_prompt_tokens + (
            parent.num_output_tokens if outputs is None else len(outputs)
        )
        is_over = child_length - parent.num_prompt_tokens >= sampling.max_tokens
        if is_over or child_length > self.config.max_model_len or (outputs and outputs[0] in (EOS, 3)):
            return
        try:
            child = self.scheduler.fork(
                parent, str(self.num_requests), sampling, output_token_ids=outputs, now_s=0.0
            )
        except RequestError:
            return
        self.num_requests += 1
        self._register(child, child.token_ids)
        self.forked.add(child.request_id)
        self.computed[child.request_id] = child.cache.num_tokens

    def _on_draft(self, count: int, num_right: int) -> None:
        """Drafts for every running sequence; the first `num_right` of each are what the model says."""
        if not self.config.max_num_draft_tokens:
            return
        for index, s in enumerate(self.live.values()):
            tokens, num_inflight = s.token_ids, s.schedule.total_inflight_tokens
            for _ in range(num_inflight):
                tokens.append(next_token(tokens, s.sampling.seed))
            for i in range(1 + (count + index) % 3):
                right = next_token(tokens, s.sampling.seed)
                tokens.append(right if i < num_right else (right + 1) % VOCABULARY)
            self.scheduler.set_drafts(s, tokens[s.num_tokens + num_inflight :])

    def _on_finish_transfer(self, index: int) -> None:
        s = self._pick(index, self.in_transfer)
        if s is not None:
            del self.in_transfer[s.request_id]
            self.worker.receive(s)
            assert not s.cache.num_tokens or self.config.partial_pulls
            was_aborted = s.is_finished
            first = next_token(s.token_ids, s.sampling.seed)
            self.scheduler.admit_arrived(s, first)
            assert was_aborted or s.output_token_ids == [first]
            self.computed[s.request_id] = s.num_prompt_tokens
        held = self._pick(index, self.held)
        if held is not None:
            del self.held[held.request_id]
            self.scheduler.release_handover(held)
            self._end(held)

    def _on_drop(self, index: int) -> None:
        s = self._pick(index, self.in_transfer)
        if s is not None:
            del self.in_transfer[s.request_id]
            self.scheduler.drop_remote(s, "error")
            self._end(s)

    # ----- steps

    def step(self, events_meanwhile: Many[Event] = ()) -> None:
        self.without_blocks |= {name for name, s in self.live.items() if not s.holds_blocks}
        self.unadmitted_forks = {name for name, s in self.live.items() if s.is_unadmitted_fork}
        outputs = self.scheduler.schedule()
        self.scheduler.check_invariants()
        self._check_outputs(outputs)
        for s in [*outputs.finished, *outputs.ignored]:
            self._end(s)
        if self.overlapped:
            for event in events_meanwhile:
                self.apply(event)
            previous, self.launched = self.launched, None
            if previous is not None:
                self._finish(previous)
            self.launched = self._launch(outputs, previous)
        else:
            launched = self._launch(outputs, None)
            if launched is not None:
                for event in events_meanwhile:
                    self.apply(event)
                self._finish(launched)

    def _launch(self, outputs: SchedulerOutputs, previous: Launched | None) -> Launched | None:
        batch = outputs.batch
        if batch is None:
            self.worker.copy(outputs)
            self.scheduler.process_outputs(outputs, np.empty(0, np.int64), now_s=0.0)
            return None
        if previous is not None and not outputs.prompt_run:
            rejected = _num_rejected(previous)
            batch = batch.resolve_inputs(np.array(previous.sampled, np.int64), np.array(rejected, np.int32))
        sampled, accepted = self.worker.run(outputs, batch)
        return Launched(outputs, sampled, accepted)

    def _finish(self, launched: Launched) -> None:
        outputs = launched.outputs
        has_drafts = not outputs.prompt_run and outputs.num_batched_tokens > len(outputs.sequences)
        before = {s.request_id: s.num_tokens for s in outputs.sequences}
        results = self.scheduler.process_outputs(
            outputs,
            np.array(launched.sampled, np.int64),
            np.array(launched.accepted, np.int64) if has_drafts else None,
            now_s=1.0,
        )
        self.scheduler.check_invariants()
        assert results.num_appended.size == len(outputs.sequences)
        assert results.num_appended.sum() == results.token_ids.size
        for s, offset, count in zip(
            outputs.sequences, results.offsets.tolist(), results.num_appended.tolist(), strict=True
        ):
            appended = results.token_ids[offset : offset + count].tolist()
            assert s.token_ids[before[s.request_id] :] == appended
            if s.status is SequenceStatus.WAITING and not s.holds_blocks:
                self.computed[s.request_id] = 0
        for s in results.prompts_done:
            self.held[s.request_id] = s
        for s in results.finished:
            self._end(s)

    def _check_outputs(self, outputs: SchedulerOutputs) -> None:
        assert outputs.num_batched_tokens == int(outputs.seqlens_q.sum())
        if outputs.batch is None:
            assert not outputs.sequences
            return
        assert (outputs.seqlens_q > 0).all()
        assert outputs.batch.num_tokens == outputs.num_batched_tokens
        assert len(outputs.sequences) <= self.config.max_num_seqs
        if not outputs.prompt_run:
            assert self.config.engine_type is not EngineType.PROMPT
            lengths = outputs.batch.seqlens_k - outputs.seqlens_q
            assert (np.diff(lengths) <= 0).all(), "longest first"
            return
        assert self.config.engine_type is not EngineType.COMPLETION
        alignment = self.config.cut_alignment
        assert sum(-(-q // alignment) * alignment for q in outputs.seqlens_q.tolist()) <= (
            self.config.max_num_batched_tokens // alignment * alignment
        )
        for s, q, k in zip(
            outputs.sequences, outputs.seqlens_q.tolist(), outputs.batch.seqlens_k.tolist(), strict=True
        ):
            self._check_chunk(s, q, k)

    def _check_chunk(self, s: Sequence, q: int, k: int) -> None:
        """Every position is computed once, in order; cuts are aligned and spare images; first come first."""
        # A fork may give its pins up and be admitted, behind a cached prefix, in one and the same step.
        gave_up = s.request_id in self.unadmitted_forks and k - q < self.computed[s.request_id]
        if s.request_id in self.without_blocks or gave_up:
            self.without_blocks.discard(s.request_id)
            self._on_first_chunk(s, k - q)
        assert k - q == self.computed[s.request_id], (
            f"{s!r} computes {k - q}.., has {self.computed[s.request_id]}"
        )
        self.computed[s.request_id] = k
        if k < s.num_tokens:
            assert q % self.config.cut_alignment == 0
            assert q >= self.config.min_chunk
            tokens = s.token_ids
            assert not (tokens[k] == IMAGE_PAD and tokens[k - 1] in (IMAGE_START, IMAGE_PAD)), "image cut"

    def _on_first_chunk(self, s: Sequence, start: int) -> None:
        is_hit = self.config.prefix_cache and start % self.config.block_size == 0
        self.computed[s.request_id] = start if is_hit else 0
        if s.request_id in self.forked or s.request_id in self.admitted:
            return
        self.admitted.add(s.request_id)
        assert s.cache.hit_tokens == start < s.num_prompt_tokens
        self.first_steps.append(int(s.request_id))
        if self.config.waiting_policy is WaitingPolicy.FCFS:
            assert self.first_steps == sorted(self.first_steps), "overtaken in the queue"

    def _end(self, s: Sequence) -> None:
        self.ended[s.request_id] += 1
        assert self.ended[s.request_id] == 1, f"{s!r} ended twice"
        self.live.pop(s.request_id, None)
        expected = self.expected[s.request_id].outputs(self.config.max_model_len)
        outputs = s.output_token_ids
        assert outputs == expected[: len(outputs)], f"{s!r}: {outputs} instead of {expected}"
        if s.status in UNDISTURBED:
            assert outputs == expected

    def _follow_events(self) -> None:
        """What a router that reads the cache's events believes is cached."""
        for event in self.scheduler.take_cache_events():
            names = set(event.names)
            if event.kind == "stored":
                assert not names & self.cached_names
                self.cached_names |= names
            else:
                assert event.kind == "removed"
                assert names <= self.cached_names
                self.cached_names -= names

    # ----- the end

    def drain(self) -> None:
        """No more events: everything must end, and everything must be free again."""
        for s in list(self.live.values()):
            self.scheduler.set_schedulable(s.request_id)
        budget = 100 + 40 * sum(s.num_tokens + s.sampling.max_tokens for s in self.live.values())
        while self.loans or self.imports:
            self._on_return(True)
        while self.scheduler.has_work() or self.launched or self.held or self.in_transfer:
            self._on_finish_transfer(0)
            self.step()
            budget -= 1
            assert budget > 0, f"stuck with {list(self.live.values())}"
        assert not self.live
        assert self.scheduler.num_free_blocks == self.scheduler.num_usable_blocks
        self._empty_cache()
        assert self.scheduler.num_free_slots in (None, (self.config.num_state_slots or 0) - 1)
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_held == 0
        assert set(self.ended) == set(self.expected)

    def _empty_cache(self) -> None:
        cache = self.scheduler.cache
        if cache is None:
            return
        num_blocks = cache.num_blocks
        self._follow_events()
        assert len(self.cached_names) == num_blocks
        cache.evict(num_blocks)
        self._follow_events()
        assert not self.cached_names
        self.scheduler.check_invariants()
        assert cache.num_blocks == 0
        assert self.scheduler.cache_stats().num_evicted_blocks >= num_blocks


def _num_rejected(launched: Launched) -> list[int]:
    """Per row, drafts of that row that were not accepted."""
    counts, at = [], 0
    for q in launched.outputs.seqlens_q.tolist():
        drafts = [] if launched.outputs.prompt_run else launched.accepted[at : at + q - 1]
        at += len(drafts)
        counts.append(drafts.count(-1))
    return counts


def run_life(config: SchedulerConfig, history: Many[Many[Event]], overlapped: bool) -> Life:
    life = Life(config, overlapped)
    for index, happenings in enumerate(history):
        # Some events fall between a step and its results.
        split = len(happenings) if index % 3 else len(happenings) // 2
        for event in happenings[:split]:
            life.apply(event)
        life.step(happenings[split:])
    life.drain()
    return life
