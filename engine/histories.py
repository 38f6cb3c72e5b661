"""What drawing a token needs to know of the tokens before it: counts for penalties, a grammar's state.

A history holds committed tokens only. The engine thread sends what was committed since the last step along
with each step; the thread that runs steps adds it. Tokens that are drawn but not committed yet (a step in
flight, drafts being verified) are looked at as an extra and leave no trace, so a step whose results are
thrown away, or a rejected draft, needs no undoing.
"""

from dataclasses import dataclass

from engine.grammars import Grammar, Matcher
from engine.token_counts import TokenCounts
from shared_scheduler import Cohort, SchedulerOutputs, Sequence
from wire.sampling import SamplingParams


class TokenHistory:
    """Of one sequence. `num_sent` belongs to the engine thread, all else to the one that runs steps."""

    def __init__(self, matcher: Matcher | None) -> None:
        self.num_sent = 0
        self.matcher = matcher
        self.counts: TokenCounts | None = None
        self.has_failed = False
        """The sequence has a token that its grammar does not allow."""

    def commit(self, update: "HistoryUpdate") -> None:
        if update.sampling.has_penalties:
            if self.counts is None:
                self.counts = TokenCounts(update.prompt_token_ids)
            self.counts.add(update.output_token_ids)
        if self.matcher is not None and not self.matcher.accept(update.output_token_ids):
            self.has_failed = True


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """Tokens of the sequence at `index` of a step, committed since the last update."""

    index: int
    history: TokenHistory
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def is_structured(self) -> bool:
        return self.history.matcher is not None


class Histories:
    """The engine thread's side. A sequence carries its history along."""

    def __init__(self) -> None:
        self._cohort: Cohort | None = None
        self._needy: list[tuple[int, Sequence]] = []

    def updates(self, outputs: SchedulerOutputs) -> tuple[HistoryUpdate, ...]:
        """For every sequence of the step whose tokens matter to what it draws."""
        if outputs.cohort is not self._cohort:
            self._cohort = outputs.cohort
            self._needy = [
                (index, sequence)
                for index, sequence in enumerate(outputs.sequences)
                if sequence.sampling.depends_on_tokens
            ]
        return tuple(self._update(index, sequence) for index, sequence in self._needy)

    def _update(self, index: int, sequence: Sequence) -> HistoryUpdate:
        history = sequence.history
        if history is None:
            history = sequence.history = TokenHistory(_matcher(sequence))
        assert isinstance(history, TokenHistory)
        tokens, num_prompt = sequence.token_array(), sequence.num_prompt_tokens
        start, history.num_sent = history.num_sent, tokens.size
        return HistoryUpdate(
            index,
            history,
            sequence.sampling,
            tokens[start:num_prompt].tolist(),
            tokens[max(start, num_prompt) :].tolist(),
        )


def _matcher(sequence: Sequence) -> Matcher | None:
    """At the grammar's beginning. Steps wait for this, so it never compiles."""
    if sequence.sampling.structured is None:
        return None
    grammar = sequence.structured.grammar
    assert isinstance(grammar, Grammar), "a request with a structure starts once it is compiled"
    sequence.structured.started = True
    return Matcher(grammar)
