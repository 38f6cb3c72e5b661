"""Which engines serve a request: pure functions over a snapshot of the fleet."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import msgspec

from proxy.fleet import Engine, FleetSnapshot
from proxy.role_policies import POLICIES, Ask, Candidate, PolicyName
from wire.services import EngineInfo


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt engine and a completion engine of equal compatibility hash."""

    prompt: Engine
    completion: Engine
    lender: Engine | None = None
    """The completion engine that should have more of the prompt cached than the prompt engine has."""
    engines: tuple[Engine, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engines", (self.prompt, self.completion))


@dataclass(frozen=True, slots=True)
class Single:
    """A NORMAL engine, which serves a request alone."""

    normal: Engine
    engines: tuple[Engine, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engines", (self.normal,))


Route = Pair | Single


class HasEngines(Protocol):
    """A route, or a part of one; the engine that decodes is the last."""

    @property
    def engines(self) -> tuple[Engine, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingRules:
    """A policy for each role, and what comes before it."""

    prompt: PolicyName = "prefix"
    completion: PolicyName = "prefix"
    normal: PolicyName = "round_robin"
    zone: str | None = None
    """This proxy's: prompt and NORMAL engines of the same zone come first."""
    normal_max_new_tokens: int | None = None
    """A prompt with at most so many tokens to compute goes to a NORMAL engine, if there is one."""


ROUND_ROBIN = PairingRules(prompt="round_robin", completion="round_robin")


class Knowledge(msgspec.Struct, frozen=True):
    """What this proxy knows of engines beside what they say themselves, by URL."""

    num_queued_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    num_cached_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Of the prompt in question."""

    def candidates(self, engines: Iterable[Engine]) -> list[Candidate]:
        queued, cached = self.num_queued_tokens, self.num_cached_tokens
        return [Candidate(e, queued.get(e.url, 0), cached.get(e.url, 0)) for e in engines]


NOTHING_KNOWN = Knowledge()


def choose_route(
    fleet: FleetSnapshot, ask: Ask, rules: PairingRules, known: Knowledge = NOTHING_KNOWN
) -> Route | None:
    """The route of a prompt; None when nothing could serve it.

    NORMAL engines serve short and mostly cached prompts, if the rules say so, and all where no pair is left.
    """
    completions, normals = fleet.routable("completion"), fleet.routable("normal")
    prompts = _paired_prompts(fleet)
    if normals:
        candidates = known.candidates(_in_zone(normals, rules.zone))
        normal = POLICIES[rules.normal](candidates, ask)
        if not prompts or _is_short(ask.num_prompt_tokens - normal.num_cached_tokens, rules):
            return Single(normal.engine)
    return _choose_pair(prompts, completions, ask, rules, known) if prompts else None


def another_completion(
    fleet: FleetSnapshot, prompt: Engine, ask: Ask, rules: PairingRules, known: Knowledge = NOTHING_KNOWN
) -> Engine | None:
    """Who could take a hand-over that `prompt` keeps, of the fleet's engines."""
    partners = _partners(prompt, fleet.routable("completion"))
    if not partners:
        return None
    near = _in_zone(partners, _info(prompt).zone)
    return POLICIES[rules.completion](known.candidates(near), ask).engine


def route_at(fleet: FleetSnapshot, turn: int) -> Route | None:
    """The route of request number `turn`, counting from 0, where all engines take turns."""
    return choose_route(fleet, Ask(turn=turn), ROUND_ROBIN)


def _choose_pair(
    prompts: Sequence[Engine], completions: Sequence[Engine], ask: Ask, rules: PairingRules, known: Knowledge
) -> Pair:
    """The completion engine comes from the prompt engine's zone where it has one there: KV moves between."""
    near = _in_zone(prompts, rules.zone)
    prompt = POLICIES[rules.prompt](known.candidates(near), ask).engine
    partners = _in_zone(_partners(prompt, completions), _info(prompt).zone)
    ask = msgspec.structs.replace(ask, turn=ask.turn // len(near))
    completion = POLICIES[rules.completion](known.candidates(partners), ask).engine
    return Pair(prompt, completion, _lender(prompt, _partners(prompt, completions), known))


@lru_cache(maxsize=8)
def _paired_prompts(fleet: FleetSnapshot) -> Sequence[Engine]:
    completions = fleet.routable("completion")
    return [engine for engine in fleet.routable("prompt") if _partners(engine, completions)]


def _lender(prompt: Engine, completions: Sequence[Engine], known: Knowledge) -> Engine | None:
    """Who has most of the prompt cached, having decoded earlier turns, if that is more than `prompt` has."""
    (own,) = known.candidates((prompt,))
    lenders = [
        candidate
        for candidate in known.candidates(completions)
        if candidate.num_cached_tokens > own.num_cached_tokens
        and _info(candidate.engine).control_address is not None
    ]
    return max(lenders, key=lambda lender: lender.num_cached_tokens).engine if lenders else None


def _is_short(num_new_tokens: int, rules: PairingRules) -> bool:
    return rules.normal_max_new_tokens is not None and num_new_tokens <= rules.normal_max_new_tokens


def _in_zone(engines: Sequence[Engine], zone: str | None) -> Sequence[Engine]:
    """Those of the zone; all where there are none, or where it is not known."""
    if zone is None:
        return engines
    return [engine for engine in engines if _info(engine).zone == zone] or engines


def explain_missing_route(fleet: FleetSnapshot) -> str:
    """One line that says why `route_at` finds nothing."""
    if not fleet.engines:
        return "no engine is known; see --prompt-url and --completion-url, or --discovery"
    prompts, completions = fleet.routable("prompt"), fleet.routable("completion")
    if prompts and completions:
        return f"no prompt engine fits a completion engine: {_differences(prompts[0], completions[0])}"
    return fleet.problems() or "a prompt and a completion engine are needed, only one role is configured"


def max_model_len(route: HasEngines) -> int:
    """The tokens of prompt and completion together that every engine of the route takes."""
    first, *others = route.engines
    limit = _info(first).max_model_len
    for engine in others:
        limit = min(limit, _info(engine).max_model_len)
    return limit


@lru_cache(maxsize=8)
def longest_model_len(fleet: FleetSnapshot) -> int | None:
    """The tokens that some engine takes, whatever the route; None when nothing could be served."""
    completions = fleet.routable("completion")
    is_served = fleet.routable("normal") or any(
        _partners(prompt, completions) for prompt in fleet.routable("prompt")
    )
    return longest_of_any(fleet) if is_served else None


def longest_of_routes(fleet: FleetSnapshot) -> int:
    """The tokens that some route takes from end to end; 0 where there is none."""
    completions = fleet.routable("completion")
    routes: list[HasEngines] = [Single(normal) for normal in fleet.routable("normal")]
    for prompt in fleet.routable("prompt"):
        routes += [Pair(prompt, completion) for completion in _partners(prompt, completions)]
    return max(map(max_model_len, routes), default=0)


def longest_of_any(fleet: FleetSnapshot) -> int | None:
    """The same where one leg of a route is enough."""
    if not any(engine.is_routable for engine in fleet.engines):
        return None
    return max(_info(engine).max_model_len for engine in fleet.engines if engine.is_routable)


def max_pool_tokens(route: HasEngines) -> int:
    """The tokens that fit into the KV pool of the engine that decodes."""
    info = _info(route.engines[-1])
    return info.num_usable_blocks * info.block_size


def _partners(prompt: Engine, completions: Sequence[Engine]) -> list[Engine]:
    wanted = _info(prompt).compatibility_hash
    return [engine for engine in completions if _info(engine).compatibility_hash == wanted]


def _differences(left: Engine, right: Engine) -> str:
    ours, theirs = _info(left).compatibility, _info(right).compatibility
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    shown = [f"{name} is {ours.get(name)} and {theirs.get(name)}" for name in names]
    return ", ".join(shown) or "their compatibility hashes differ"


def _info(engine: Engine) -> EngineInfo:
    assert engine.info is not None, "only routable engines are paired"
    return engine.info
