"""Where drafts come from: guesses at what follows a sequence, with the chance of each."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared_scheduler import Sequence

MAX_MATCH = 4
"""A match of more tokens than this is no better a sign."""
FORGETTING = 0.98
"""Weight of a guess in the record after a newer one."""
PRIOR_RATES, PRIOR_WEIGHT = np.array([0.15, 0.4, 0.6, 0.75]), 4.0
"""Share of guesses that come true behind a match of 1, 2, .. tokens, until it was measured, and how many
guesses this weighs. With SmolLM2: 0.18, 0.50, 0.75, 0.89 on code, 0.18, 0.48, 0.71, 0.68 in chat."""
SHARED_WEIGHT = 4.0
"""How many of its own guesses the record of all sequences weighs in that of one."""

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A running sequence for which drafts are wanted."""

    sequence: Sequence
    in_flight: tuple[int, ...] | None = None
    """None: its last token is known. Else a step that is not back yet verifies these drafts and draws one
    token more, behind which the new drafts stand."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may follow a sequence, and the probability of each, given that those before it do."""

    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


NO_DRAFTS = Drafts()


class Drafter(Protocol):
    """A source of drafts. Called by the engine thread only."""

    def propose(self, contexts: Items[DraftContext], num_tokens: int) -> list[Drafts]:
        """At most `num_tokens` drafts for each."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """What was expected at `position` of a sequence; the first `num_given` tokens are not our own guess."""

    position: int
    token_ids: Int32Array
    num_given: int
    match_length: int


class PromptLookup:
    """Drafts what followed the last time when the newest tokens stood in the sequence (n-gram lookup).

    It needs nothing but the tokens, so a sequence that was handed over is drafted for like any other. How
    likely a guess is depends on how many tokens match before it. That is measured, over all sequences and
    for each, by what has come of every guess, whether it was verified or not.
    """

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: one more than the largest draft slot that a sequence may have."""
        self._all = _Record(1)
        self._each = _Record(num_slots)
        self._owners: list[Sequence | None] = [None] * num_slots
        self._guesses: list[_Guess | None] = [None] * num_slots

    def propose(self, contexts: Items[DraftContext], num_tokens: int) -> list[Drafts]:
        return [self._propose(context, num_tokens) for context in contexts]

    def _propose(self, context: DraftContext, num_tokens: int) -> Drafts:
        slot, tokens = self._slot(context.sequence), context.sequence.token_array()
        self._learn(slot, tokens)
        given = np.array(context.in_flight or (), np.int32)
        num_skipped = given.size + (context.in_flight is not None)
        expected = np.concatenate((tokens, given)) if given.size else tokens
        following, match_length = look_up(expected, num_tokens + num_skipped - given.size)
        if not match_length:
            return NO_DRAFTS
        guess = np.concatenate((given, following))
        self._guesses[slot] = _Guess(tokens.size, guess, given.size, match_length)
        chances = self._chances(slot, match_length - given.size, guess.size)
        if num_skipped:
            chances[num_skipped] *= chances[:num_skipped].prod()
        return Drafts(tuple(guess[num_skipped:].tolist()), tuple(chances[num_skipped:].tolist()))

    def _chances(self, slot: int, match_length: int, num_tokens: int) -> Float64Array:
        """The chance of each of the tokens behind a match, given those before it."""
        rates = self._each.rates(slot, self._all.rates(0, PRIOR_RATES, PRIOR_WEIGHT), SHARED_WEIGHT)
        lengths = np.clip(match_length + np.arange(num_tokens), 1, MAX_MATCH)
        return rates[lengths - 1]

    def _learn(self, slot: int, tokens: Int32Array) -> None:
        """Compare the last guess with what has come since."""
        guess, self._guesses[slot] = self._guesses[slot], None
        if guess is None:
            return
        come = tokens[guess.position :][: guess.token_ids.size]
        is_right = come == guess.token_ids[: come.size]
        if not is_right[: guess.num_given].all():
            return
        for record, place in ((self._all, 0), (self._each, slot)):
            record.add(place, guess.match_length, is_right[guess.num_given :].tolist())

    def _slot(self, sequence: Sequence) -> int:
        """The sequence's place here, emptied if it belonged to another one until now."""
        slot = sequence.draft.info_slot
        assert slot is not None, "the scheduler gives every running sequence a draft slot"
        if self._owners[slot] is not sequence:
            self._owners[slot], self._guesses[slot] = sequence, None
            self._each.clear(slot)
        return slot


def look_up(tokens: Int32Array, num_tokens: int) -> tuple[Int32Array, int]:
    """What followed the latest of the longest earlier matches of the last tokens, and the match's length.

    A continuation that reaches the end goes on as if it repeated itself. Length 0: nothing matches.
    """
    last = tokens.size - 1
    matches = np.flatnonzero(tokens[:last] == tokens[last])
    if not matches.size:
        return tokens[:0], 0
    length = 1
    while length < MAX_MATCH:
        longer = matches[matches >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not longer.size:
            break
        matches, length = longer, length + 1
    return np.resize(tokens[int(matches[-1]) + 1 :], num_tokens), length


class _Record:
    """How many guesses came true, per place and length of the match before them, old ones fading."""

    def __init__(self, num_places: int) -> None:
        self._right = np.zeros((num_places, MAX_MATCH))
        self._made = np.zeros((num_places, MAX_MATCH))

    def clear(self, place: int) -> None:
        self._right[place] = self._made[place] = 0.0

    def add(self, place: int, match_length: int, is_right: list[bool]) -> None:
        """Tokens behind a match of this length; those behind the first wrong one tell nothing."""
        for length, right in enumerate(is_right, match_length):
            at = min(length, MAX_MATCH) - 1
            self._made[place, at] = FORGETTING * self._made[place, at] + 1.0
            self._right[place, at] = FORGETTING * self._right[place, at] + right
            if not right:
                return

    def rates(self, place: int, prior: Float64Array, weight: float) -> Float64Array:
        """float64 [MAX_MATCH]: share that came true, with `weight` imagined guesses that fared as `prior`."""
        rates: Float64Array = (self._right[place] + weight * prior) / (self._made[place] + weight)
        return rates
