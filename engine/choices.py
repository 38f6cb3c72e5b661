"""The choices of one request: its prompt is computed once, then each goes its own way.

1. added     the request is entered here; one sequence, which bears the request's id, computes the prompt
2. drawing   the prompt's last chunk is launched: all first tokens are drawn from its one row of logits
3. begun     the results are in; the sequence stands for the first choice that goes on after its first token
4. parted    NORMAL: every other choice that goes on is now a fork of the sequence
             PROMPT: the hand-over takes the first tokens of all of them along, and the request leaves
             COMPLETION: begins here, when the KV has arrived: one sequence and its forks
5. ended     with its last choice, with the first one that fails, or by an abort

A request for one choice is never entered: its sequence is all there is.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from engine.ipc import AddRequest, RequestOutput
from engine.prompt_logprobs import take_prompt_logprobs
from engine.sampler import Int64Array, SampledTokens
from kv_transfer.messages import ChoiceStart
from shared_scheduler import (
    EngineType,
    RequestError,
    Scheduler,
    SchedulerOutputs,
    Sequence,
    StepResults,
)
from wire.sampling import SamplingParams
from wire.services import FinishReason, OutputToken, PromptLogprobs

FORK_MARK = "#"
"""Stands between a request's id and the number of a choice in the id of a fork; in no request's id."""


@dataclass(slots=True)
class _Group:
    """One request and its choices."""

    request_id: str
    sampling: tuple[SamplingParams, ...]
    starts: tuple[ChoiceStart, ...] = ()
    """First tokens of the choices that go on."""
    reasons: tuple[FinishReason | None, ...] = ()
    """How each choice ends with its first token, where it does."""
    first_outputs: list[RequestOutput] = field(default_factory=list)
    """Not reported yet."""
    living: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0
    is_over: bool = False
    """Nothing more is to be reported, although some sequences have not ended yet."""


@dataclass(frozen=True, slots=True)
class FirstDraw:
    """The first tokens of one request's choices: `places` among the sampled tokens of a step."""

    group: _Group
    row: int
    """Of the sequence that computes the prompt."""
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FirstDraws:
    """What a step draws beside one token for each of its sequences: one row per entry of `sampling`.

    `logit_rows`: whose logits each of these rows uses. Every one draws an output token 0.
    """

    draws: tuple[FirstDraw, ...] = ()
    logit_rows: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    sampling: tuple[SamplingParams, ...] = ()


NO_DRAWS = FirstDraws()


class Choices:
    """The book of all requests for several choices; the engine and its role share one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_prompt_engine = scheduler.config.engine_type is EngineType.PROMPT
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, tuple[_Group, int]] = {}
        """Sequence id → the request it belongs to and the choice it stands for."""

    # ----- requests

    def check(self, request: AddRequest) -> None:
        """`RequestError` where the request cannot be added."""
        if FORK_MARK in request.request_id:
            raise RequestError(f"request_id {request.request_id!r} contains {FORK_MARK!r}")
        if request.request_id in self._groups:
            raise RequestError(f"request_id {request.request_id!r} is in use")

    def add(self, request: AddRequest) -> None:
        """Enter a request whose sequence has been taken in."""
        if request.num_completions == 1:
            return
        sampling = tuple(map(request.sampling.of_choice, range(request.num_completions)))
        group = _Group(request.request_id, sampling)
        self._groups[request.request_id] = group
        self._members[request.request_id] = (group, 0)

    def abort(self, request_id: str) -> None:
        """End all forks; the request's own sequence is ended by whoever has started it."""
        group = self._groups.get(request_id)
        if group is not None:
            self._members.pop(request_id, None)
            self._end(group)

    # ----- a step of a NORMAL or PROMPT engine

    def draws(self, outputs: SchedulerOutputs) -> FirstDraws:
        """The first tokens that a step is to draw; ask before it is launched."""
        if not (self._groups and outputs.prompt_run):
            return NO_DRAWS
        draws: list[FirstDraw] = []
        logit_rows: list[int] = []
        sampling: list[SamplingParams] = []
        for row, sequence in enumerate(outputs.sequences):
            group = self._groups.get(sequence.request_id)
            if group is not None and _is_last_chunk(sequence):
                first = len(outputs.sequences) + len(sampling)
                sampling += group.sampling[1:]
                logit_rows += [row] * (len(group.sampling) - 1)
                draws.append(FirstDraw(group, row, (row, *range(first, first + len(group.sampling) - 1))))
        return FirstDraws(tuple(draws), np.array(logit_rows, np.intp), tuple(sampling))

    def tokens_of_sequences(
        self, outputs: SchedulerOutputs, draws: FirstDraws, drawn: Int64Array
    ) -> Int64Array:
        """One sampled token per sequence: that of the choice which the sequence stands for from now on."""
        if not draws.draws:
            return drawn
        token_ids = drawn[: len(outputs.sequences)].copy()
        for draw in draws.draws:
            group, sequence = draw.group, outputs.sequences[draw.row]
            first_ids = drawn[list(draw.places)].tolist()
            group.reasons = tuple(self._scheduler.reason_after(sequence, token_id) for token_id in first_ids)
            group.starts = tuple(
                ChoiceStart(choice, token_id)
                for choice, token_id in enumerate(first_ids)
                if group.reasons[choice] is None
            )
            if group.starts:
                token_ids[draw.row] = group.starts[0].token_id
        return token_ids

    def part(
        self,
        outputs: SchedulerOutputs,
        draws: FirstDraws,
        results: StepResults,
        sampled: SampledTokens,
        now_s: float,
    ) -> None:
        """The first tokens are in the ledgers: let every choice that goes on go its own way."""
        for draw in draws.draws:
            if not results.num_appended[draw.row]:
                continue  # aborted while the step ran
            group, sequence = draw.group, outputs.sequences[draw.row]
            assert sequence.is_finished == (not group.starts), "the scheduler stops where we do"
            group.num_cached_tokens = sequence.cache.hit_tokens
            group.first_outputs = _first_outputs(draw, sampled, take_prompt_logprobs(sequence, 0))
            if group.starts:
                self._go_on(group, sequence, group.starts, now_s)

    # ----- hand-over

    def starts(self, sequence: Sequence) -> tuple[ChoiceStart, ...]:
        """PROMPT: what a computed prompt is offered with."""
        group = self._groups.get(sequence.request_id)
        return (ChoiceStart(0, sequence.last_token_id),) if group is None else group.starts

    def mismatch(self, sequence: Sequence, starts: Items[ChoiceStart]) -> str | None:
        """COMPLETION: why these cannot be first tokens of the choices that the request asks for."""
        group = self._groups.get(sequence.request_id)
        num_choices = 1 if group is None else len(group.sampling)
        numbers = [start.choice for start in starts]
        if numbers == sorted(set(numbers) & set(range(num_choices))):
            return None
        return f"the prompt engine offers choices {numbers}, the request asks for {num_choices}"

    def admit(self, sequence: Sequence, starts: Items[ChoiceStart], now_s: float) -> None:
        """COMPLETION: the prompt's KV has arrived; its choices decode from their first tokens on."""
        group = self._groups.get(sequence.request_id)
        if group is not None:
            sequence.sampling = group.sampling[starts[0].choice]
        self._scheduler.admit_arrived(sequence, starts[0].token_id)
        if group is not None:
            # Where our own limits end it at once, nothing is left to fork: its end is the request's.
            self._go_on(group, sequence, starts[:1] if sequence.is_finished else starts, now_s)

    # ----- reports

    def addressed(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Outputs of sequences as outputs of requests: id, choice, and whether it was the last."""
        if not self._members:
            return list(outputs)
        return [addressed for output in outputs for addressed in self._address(output)]

    def check_invariants(self) -> None:
        for request_id, group in self._groups.items():
            assert group.request_id == request_id
            assert not group.is_over
            choices = {choice for other, choice in self._members.values() if other is group}
            assert group.living <= choices, f"{group.living} live, {choices} have sequences"

    def _go_on(self, group: _Group, sequence: Sequence, starts: Items[ChoiceStart], now_s: float) -> None:
        own, *others = starts
        group.living = {start.choice for start in starts}
        sequence.sampling = group.sampling[own.choice]
        self._members[sequence.request_id] = (group, own.choice)
        if self._is_prompt_engine:
            return
        for start in others:
            fork_id = f"{group.request_id}{FORK_MARK}{start.choice}"
            self._scheduler.fork(
                sequence,
                fork_id,
                group.sampling[start.choice],
                output_token_ids=[start.token_id],
                now_s=now_s,
            )
            self._members[fork_id] = (group, start.choice)

    def _address(self, output: RequestOutput) -> Items[RequestOutput]:
        member = self._members.get(output.request_id)
        if member is None:
            return (output,)
        group, choice = member
        if group.first_outputs:
            return self._take_first_outputs(group)
        if output.is_last:
            del self._members[output.request_id]
            group.living.discard(choice)
        if group.is_over:
            return ()
        is_last = output.is_last and (_fails(output) or not group.living)
        if is_last:
            self._end(group)
        return (
            msgspec.structs.replace(
                output,
                request_id=group.request_id,
                choice=choice,
                is_last=is_last,
                num_cached_tokens=group.num_cached_tokens,
            ),
        )

    def _take_first_outputs(self, group: _Group) -> list[RequestOutput]:
        outputs, group.first_outputs = group.first_outputs, []
        if not group.living:
            outputs[-1] = msgspec.structs.replace(outputs[-1], is_last=True)
        if self._is_prompt_engine or not group.living:
            del self._groups[group.request_id]
            del self._members[group.request_id]
        return outputs

    def _end(self, group: _Group) -> None:
        """Nothing more of this request is reported; what still runs is aborted."""
        del self._groups[group.request_id]
        group.is_over = True
        for sequence_id, (other, _) in self._members.items():
            if other is group:
                self._scheduler.abort(sequence_id)


def _is_last_chunk(sequence: Sequence) -> bool:
    """Does the step that was just scheduled sample the sequence's output token 0?"""
    return sequence.num_output_tokens == 0 and sequence.schedule.chunked_rest_len == 0


def _first_outputs(
    draw: FirstDraw, sampled: SampledTokens, prompt_logprobs: PromptLogprobs | None
) -> list[RequestOutput]:
    return [
        RequestOutput(
            request_id=draw.group.request_id,
            choice=choice,
            tokens=(
                OutputToken(
                    index=0,
                    token_id=int(sampled.token_ids[place]),
                    logprobs=None if sampled.logprobs is None else sampled.logprobs.row(place),
                ),
            ),
            finish_reason=draw.group.reasons[choice],
            num_cached_tokens=draw.group.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        for choice, place in enumerate(draw.places)
    ]


def _fails(output: RequestOutput) -> bool:
    """A choice that ends in any other way than these ends its request."""
    return output.finish_reason not in ("stop", "length")
