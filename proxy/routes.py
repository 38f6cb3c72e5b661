"""Finds engines for prompts: the policy's choice among those that are fit now."""

from proxy.engines import EngineDirectory, EngineStart, FleetSnapshot
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
        return self._policy.choose(self.snapshot())

    def fresh(self, work: PromptWork, failed: frozenset[EngineStart]) -> Route | None:
        """A route that takes all of `work`, without the engines that have failed it."""
        return self._policy.choose(self.snapshot().without(failed).taking(work.num_tokens_at_end))

    def any(self, work: PromptWork) -> Route | None:
        """A route that takes all of `work`."""
        return self.fresh(work, frozenset())

    async def wait_for_change(self) -> None:
        await self._directory.wait_for_change()
