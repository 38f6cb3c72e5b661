"""Which engines serve a request: pure functions over a snapshot of the fleet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.engines import Engine, FleetSnapshot
from wire.services import EngineInfo


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt engine and a completion engine of equal compatibility hash."""

    prompt: Engine
    completion: Engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.prompt, self.completion)


@dataclass(frozen=True, slots=True)
class Single:
    """A NORMAL engine, which serves a request alone."""

    normal: Engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.normal,)


Route = Pair | Single


class PairingPolicy(Protocol):
    def choose(self, fleet: FleetSnapshot) -> Route | None:
        """The route of the next request; None when nothing could serve it."""
        ...


class RoundRobin:
    """Takes prompt and completion engines in turn; NORMAL engines only where no pair is left."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, fleet: FleetSnapshot) -> Route | None:
        turn, self._turn = self._turn, self._turn + 1
        return route_at(fleet, turn)


def route_at(fleet: FleetSnapshot, turn: int) -> Route | None:
    """The route of request number `turn`, counting from 0."""
    completions = fleet.routable("completion")
    prompts = [engine for engine in fleet.routable("prompt") if _partners(engine, completions)]
    if prompts:
        prompt = prompts[turn % len(prompts)]
        partners = _partners(prompt, completions)
        return Pair(prompt, partners[turn // len(prompts) % len(partners)])
    normals = fleet.routable("normal")
    return Single(normals[turn % len(normals)]) if normals else None


def explain_missing_route(fleet: FleetSnapshot) -> str:
    """One line that says why `route_at` finds nothing."""
    if not fleet.engines:
        return "no engine is configured; see --prompt-url and --completion-url"
    prompts, completions = fleet.routable("prompt"), fleet.routable("completion")
    if prompts and completions:
        return f"no prompt engine fits a completion engine: {_differences(prompts[0], completions[0])}"
    return fleet.problems() or "a prompt and a completion engine are needed, only one role is configured"


def max_model_len(route: Route) -> int:
    """The tokens of prompt and completion together that every engine of the route takes."""
    return min(_info(engine).max_model_len for engine in route.engines)


def longest_model_len(fleet: FleetSnapshot) -> int | None:
    """The tokens that some engine takes, whatever the route; None when nothing could be served."""
    if route_at(fleet, 0) is None:
        return None
    return max(_info(engine).max_model_len for engine in fleet.engines if engine.is_routable)


def max_pool_tokens(route: Route) -> int:
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
