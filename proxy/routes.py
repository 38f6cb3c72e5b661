"""Finds engines for prompts among those that are fit now, and tells the directory how they did."""

import random
import time
from collections.abc import Mapping, Sequence

from proxy.engines import EngineDirectory
from proxy.errors import EngineFailure, EngineUnreachable
from proxy.fleet import Engine, EngineStart, FleetSnapshot
from proxy.kv_transfer_params import KvTransferParams
from proxy.loads import EngineLoads
from proxy.pairing import (
    Knowledge,
    Pair,
    PairingRules,
    Route,
    another_completion,
    choose_route,
    longest_of_routes,
)
from proxy.prefix_index import PrefixIndex
from proxy.request_flow import PromptWork
from proxy.role_policies import Ask
from proxy.single_legs import Bounds, SingleLeg, leg_of
from wire.cache import CacheEvent, prompt_block_names


class Routes:
    """Puts together what a choice depends on, and remembers what was started."""

    def __init__(self, directory: EngineDirectory, loads: EngineLoads, rules: PairingRules) -> None:
        self._directory = directory
        self.snapshot = directory.snapshot
        self._loads = loads
        self._rules = rules
        self._prefixes = PrefixIndex()
        self._turn = 0
        self._chance = random.Random()

    @property
    def num_queued_tokens(self) -> Mapping[str, int]:
        """Tokens of open legs by engine's URL."""
        return self._loads.num_queued_tokens

    def first(self, prompt_token_ids: Sequence[int], num_tokens: int, session: str | None) -> Route | None:
        """The route of a new prompt, if there is one among engines that take `num_tokens`, or any."""
        fleet = self.snapshot()
        taking = fleet.taking(num_tokens)
        route = self._choose(taking, prompt_token_ids, session)
        return (
            route if route is not None or taking is fleet else self._choose(fleet, prompt_token_ids, session)
        )

    def is_current(self, route: Route) -> bool:
        """Could all engines of the route still be chosen?

        No more where one of them was lost, or is tried out by another prompt that was chosen for it before.
        """
        is_routable = self._directory.is_routable
        return all(map(is_routable, route.engines))

    def leg(self, params: KvTransferParams, bounds: Bounds) -> SingleLeg:
        """The engine for one leg that a router of others asks for."""
        return leg_of(params, self.snapshot(), self._loads.num_queued_tokens, bounds)

    def fresh(self, work: PromptWork, failed: frozenset[EngineStart]) -> Route | None:
        """A route that takes all of `work`, without the engines that have failed it."""
        fleet = self.snapshot().without(failed).taking(work.num_tokens_at_end)
        return self._choose(fleet, work.prompt_token_ids, work.session)

    def longest(self) -> int:
        """The tokens of prompt and completion together that some route takes now."""
        return longest_of_routes(self.snapshot())

    def leaving(self) -> dict[EngineStart, float]:
        """How long engines that drain will stay."""
        now_s = time.monotonic()
        return {
            engine.start: engine.leaves_at_s - now_s
            for engine in self.snapshot().engines
            if engine.leaves_at_s is not None
        }

    def any(self, work: PromptWork) -> Route | None:
        """A route that takes all of `work`."""
        return self.fresh(work, frozenset())

    def another_completion(
        self, pair: Pair, work: PromptWork, failed: frozenset[EngineStart]
    ) -> Engine | None:
        """Who is now to take the hand-over that the pair's prompt engine keeps; none of those that failed."""
        fleet = self.snapshot().without(failed | {pair.completion.start}).taking(work.num_tokens_at_end)
        known = Knowledge(self._loads.num_queued_tokens, self._cached(fleet, work.prompt_token_ids))
        engine = another_completion(
            fleet, pair.prompt, self._ask(work.prompt_token_ids, None), self._rules, known
        )
        if engine is not None:
            self._directory.assigned(engine)
            self._remember(work.prompt_token_ids, (engine,))
        return engine

    def started(self, route: Route | SingleLeg, work: PromptWork) -> None:
        """The work is on its way: what was chosen for a request that is refused then counts for nothing."""
        for engine in route.engines:
            self._directory.assigned(engine)
        self._remember(work.prompt_token_ids, route.engines)

    def computed(self, route: Route, token_ids: Sequence[int]) -> None:
        """The engine that decoded has a whole prompt and its completion cached now."""
        self._remember(token_ids, (route.engines[-1],))

    def cache_changed(self, engine: Engine, events: Sequence[CacheEvent]) -> None:
        """The engine has told what it has cached."""
        for event in events:
            self._prefixes.apply(engine.start, event)

    async def wait_for_change(self) -> None:
        await self._directory.wait_for_change()

    def leg_failed(self, failure: EngineFailure, route: Route | SingleLeg) -> None:
        """Tell the directory what the failure says about the route's engines."""
        directory = self._directory
        failed = next(engine for engine in route.engines if engine.role == failure.role)
        if failure.status < 500:
            directory.answered(failed)
            return
        # Either side of a broken hand-over may be the one that restarted.
        for engine in route.engines:
            directory.suspect(engine)
        if isinstance(failure, EngineUnreachable):
            (directory.doubted if failure.is_slow else directory.lost)(failed)
        if not (failure.is_out_of_room or failure.is_draining):
            for engine in route.engines if failure.is_of_handover else (failed,):
                directory.failed(engine)

    def _choose(
        self, fleet: FleetSnapshot, prompt_token_ids: Sequence[int], session: str | None
    ) -> Route | None:
        ask = self._ask(prompt_token_ids, session)
        cached = self._cached(fleet, prompt_token_ids)
        return choose_route(fleet, ask, self._rules, Knowledge(self._loads.num_queued_tokens, cached))

    def _ask(self, prompt_token_ids: Sequence[int], session: str | None) -> Ask:
        turn, self._turn = self._turn, self._turn + 1
        return Ask(
            turn=turn,
            draws=(self._chance.random(), self._chance.random()),
            num_prompt_tokens=len(prompt_token_ids),
            session=session,
        )

    def _cached(self, fleet: FleetSnapshot, token_ids: Sequence[int]) -> dict[str, int]:
        """By URL; only tokens that need not be computed: the last one always is."""
        cached: dict[str, int] = {}
        if len(token_ids) <= fleet.smallest_block:
            return cached
        for block_size, engines in _by_block_size(fleet.engines).items():
            names = prompt_block_names(token_ids[:-1], block_size)
            found = self._prefixes.num_cached(names, [engine.start for engine in engines])
            cached |= {start.url: num_blocks * block_size for start, num_blocks in found.items()}
        return cached

    def _remember(self, token_ids: Sequence[int], engines: Sequence[Engine]) -> None:
        if len(token_ids) < self.snapshot().smallest_block:
            return
        for block_size, some in _by_block_size(engines).items():
            names = prompt_block_names(token_ids, block_size)
            self._prefixes.insert(names, [engine.start for engine in some])


def _by_block_size(engines: Sequence[Engine]) -> dict[int, list[Engine]]:
    groups: dict[int, list[Engine]] = {}
    for engine in engines:
        if engine.info is not None:
            groups.setdefault(engine.info.block_size, []).append(engine)
    return groups
