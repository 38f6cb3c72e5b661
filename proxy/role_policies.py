"""How one engine is chosen among several of a role: pure functions of the candidates and of what is asked.

Adding one: a function with the signature of `RolePolicy`, its name in `PolicyName` and `POLICIES`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from proxy.fleet import Engine

PolicyName = Literal["round_robin", "least_tokens", "power_of_two", "prefix", "session"]


class Candidate(msgspec.Struct, frozen=True):
    """An engine that could serve the prompt."""

    engine: Engine
    num_queued_tokens: int = 0
    """Tokens of requests that this proxy has there."""
    num_cached_tokens: int = 0
    """Of the prompt, as far as this proxy knows."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice depends on beside the engines."""

    turn: int = 0
    """Counts up, so that equals take turns."""
    draws: tuple[float, float] = (0.0, 0.0)
    """Two random numbers in [0, 1), drawn by the caller."""
    num_prompt_tokens: int = 0
    session: str | None = None
    """Requests of one session go to one engine."""


RolePolicy = Callable[[Sequence[Candidate], Ask], Candidate]
"""Takes at least one candidate."""


def round_robin(candidates: Sequence[Candidate], ask: Ask) -> Candidate:
    return candidates[ask.turn % len(candidates)]


def least_tokens(candidates: Sequence[Candidate], ask: Ask) -> Candidate:
    """The one with the least to do."""
    return min(_in_turn(candidates, ask), key=lambda candidate: candidate.num_queued_tokens)


def power_of_two(candidates: Sequence[Candidate], ask: Ask) -> Candidate:
    """The less busy of two drawn ones: many proxies that know little do not all run to the same engine."""
    first = int(ask.draws[0] * len(candidates))
    others = [*candidates[:first], *candidates[first + 1 :]]
    second = others[int(ask.draws[1] * len(others))] if others else candidates[first]
    return min((candidates[first], second), key=lambda candidate: candidate.num_queued_tokens)


def prefix(candidates: Sequence[Candidate], ask: Ask) -> Candidate:
    """The one that has to compute the least until it is done with the prompt, its queue included."""
    return min(
        _in_turn(candidates, ask),
        key=lambda candidate: (
            candidate.num_queued_tokens + ask.num_prompt_tokens - candidate.num_cached_tokens
        ),
    )


def session(candidates: Sequence[Candidate], ask: Ask) -> Candidate:
    """The session's own engine; when one goes, only its sessions move (rendezvous hashing)."""
    if ask.session is None:
        return least_tokens(candidates, ask)
    name = ask.session
    return max(candidates, key=lambda candidate: _weight(name, candidate.engine.url))


POLICIES: Mapping[PolicyName, RolePolicy] = {
    "round_robin": round_robin,
    "least_tokens": least_tokens,
    "power_of_two": power_of_two,
    "prefix": prefix,
    "session": session,
}


def _in_turn(candidates: Sequence[Candidate], ask: Ask) -> list[Candidate]:
    """Rotated, so that the first of equals is another one each time."""
    first = ask.turn % len(candidates)
    return [*candidates[first:], *candidates[:first]]


def _weight(session_name: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session_name}\n{url}".encode(), digest_size=8).digest()
