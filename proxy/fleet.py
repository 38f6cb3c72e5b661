"""What is known of engines at one moment."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

from wire.services import EngineInfo, EngineRole


class EngineStart(NamedTuple):
    """One engine from one start to its end."""

    url: str
    epoch: int | None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is known of one engine."""

    url: str
    role: EngineRole
    info: EngineInfo | None = None
    """None until it has answered, and after it was lost."""
    is_ready: bool = False
    is_ejected: bool = False
    """It says that it is ready, and fails what it is sent."""
    is_unlisted: bool = False
    """It is not listed any more: nothing new is sent there, and what runs there goes on."""
    problem: str = "not asked yet"
    leaves_at_s: float | None = None
    """Its service drains, and cuts what is still open then (monotonic clock)."""

    @cached_property
    def is_routable(self) -> bool:
        return self.is_ready and self.info is not None and not self.is_ejected and not self.is_unlisted

    @cached_property
    def start(self) -> EngineStart:
        """Differs after a restart."""
        return EngineStart(self.url, None if self.info is None else self.info.epoch)


@dataclass(frozen=True, eq=False)
class FleetSnapshot:
    """All engines at one moment; what pairing decides on.

    While nothing changes all requests see the same one: what follows from it is worked out once.
    """

    engines: tuple[Engine, ...] = ()

    def routable(self, role: EngineRole) -> tuple[Engine, ...]:
        return self._routable[role]

    @cached_property
    def _routable(self) -> Mapping[EngineRole, tuple[Engine, ...]]:
        usable = [engine for engine in self.engines if engine.is_routable]
        return {role: tuple(e for e in usable if e.role == role) for role in get_args(EngineRole)}

    @cached_property
    def shortest_model_len(self) -> int | None:
        """The tokens that every engine takes; None where one has not said how many."""
        lengths = [0 if engine.info is None else engine.info.max_model_len for engine in self.engines]
        return min(lengths, default=0) or None

    @cached_property
    def smallest_block(self) -> int:
        """Shorter prompts have no whole block at any engine."""
        return min((e.info.block_size for e in self.engines if e.info is not None), default=0)

    def without(self, starts: Collection[EngineStart]) -> "FleetSnapshot":
        return FleetSnapshot(tuple(engine for engine in self.engines if engine.start not in starts))

    def taking(self, num_tokens: int) -> "FleetSnapshot":
        """The engines that take a prompt and its completion of so many tokens together."""
        if self.shortest_model_len is not None and num_tokens <= self.shortest_model_len:
            return self
        return FleetSnapshot(
            tuple(e for e in self.engines if e.info is not None and e.info.max_model_len >= num_tokens)
        )

    def problems(self) -> str:
        """One line on every engine that cannot be used."""
        return "; ".join(
            f"{engine.role} {engine.url}: {engine.problem}"
            for engine in self.engines
            if not engine.is_routable
        )
