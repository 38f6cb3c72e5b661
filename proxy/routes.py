"""Finds engines for prompts: the policy's choice among those that are fit now."""

from proxy.engines import EngineDirectory, EngineStart, FleetSnapshot
from proxy.errors import EngineFailure, EngineUnreachable
from proxy.pairing import PairingPolicy, Route
from proxy.request_flow import PromptWork


class Routes:
    """Asks the pairing policy about the directory's newest snapshot."""

    def __init__(self, directory: EngineDirectory, policy: PairingPolicy) -> None:
        self._directory = directory
        self._policy = policy

    def snapshot(self) -> FleetSnapshot:
        return self._directory.snapshot()

    def first(self) -> Route | None:
        """The route of a new prompt; whether the prompt fits is the caller's to check."""
        return self._choose(self.snapshot())

    def fresh(self, work: PromptWork, failed: frozenset[EngineStart]) -> Route | None:
        """A route that takes all of `work`, without the engines that have failed it."""
        return self._choose(self.snapshot().without(failed).taking(work.num_tokens_at_end))

    def any(self, work: PromptWork) -> Route | None:
        """A route that takes all of `work`."""
        return self.fresh(work, frozenset())

    async def wait_for_change(self) -> None:
        await self._directory.wait_for_change()

    def leg_failed(self, failure: EngineFailure, route: Route) -> None:
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
            directory.lost(failed)
        if not failure.is_out_of_room:
            for engine in route.engines if failure.is_of_handover else (failed,):
                directory.failed(engine)

    def _choose(self, fleet: FleetSnapshot) -> Route | None:
        route = self._policy.choose(fleet)
        for engine in () if route is None else route.engines:
            self._directory.assigned(engine)
        return route
