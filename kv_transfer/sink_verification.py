"""Whether what has arrived is what the source computed: hand-overs that are read and not yet believed."""

from collections.abc import Sequence

from kv_transfer.digests import (
    DIGEST_BYTES,
    TokenDigests,
    num_digests,
    state_digest,
    tokens_per_digest,
    whole_sets,
)
from kv_transfer.errors import LayoutError
from kv_transfer.layout import Region
from kv_transfer.messages import Ending
from kv_transfer.sink_handover import Destination, Handover
from kv_transfer.units import Units


class Verification:
    """The check of one hand-over, in slices. `LayoutError` if there is nothing to check it by."""

    def __init__(
        self,
        regions: Sequence[Region],
        units: Units,
        destination: Destination,
        ending: Ending,
        num_tokens: int,
    ) -> None:
        source_size = units.remote_block_size
        num_expected = num_digests(num_tokens, source_size)
        if len(ending.digests) != (num_expected + (ending.state_slot is not None)) * DIGEST_BYTES:
            raise LayoutError(
                f"the prompt engine sent {len(ending.digests) // DIGEST_BYTES} digests for {num_tokens} "
                "tokens; start it with --verify-kv too"
            )
        self._regions = tuple(regions)
        self._destination = destination
        self._expected = ending.digests
        self._sets = [
            TokenDigests(
                ranks,
                units.local_block_size,
                num_tokens=num_tokens,
                group=tokens_per_digest(num_tokens, source_size),
                first_block=destination.first_block,
            )
            for ranks in whole_sets(regions)
        ]

    def advance(self) -> bool:
        """True once everything is looked at."""
        block_ids = self._destination.block_ids
        for tokens in self._sets:
            if not tokens.is_done(block_ids):
                tokens.advance(block_ids)
                return False
        return True

    def difference(self) -> str | None:
        """What is not as the source computed it; call when everything is looked at."""
        wrong = sorted({number for tokens in self._sets for number in tokens.wrong_blocks(self._expected)})
        if wrong:
            numbers, num_all = ", ".join(map(str, wrong[:8])), self._destination.block_ids.size
            return f"{len(wrong)} of {num_all} blocks are not what the prompt engine computed: {numbers}"
        slot = self._destination.state_slot
        if slot is not None and state_digest(self._regions, slot) != self._expected[-DIGEST_BYTES:]:
            return f"the state row {slot} is not what the prompt engine computed"
        return None


class Verifications:
    """Those under way, one slice of one of them at a time."""

    def __init__(self) -> None:
        self._checks: dict[str, tuple[Handover, Verification]] = {}

    def __len__(self) -> int:
        return len(self._checks)

    def start(self, handover: Handover, regions: Sequence[Region], units: Units) -> None:
        """`LayoutError` as of `Verification`."""
        assert handover.destination is not None
        assert handover.ending is not None
        check = Verification(regions, units, handover.destination, handover.ending, handover.num_tokens)
        self._checks[handover.handover_id] = handover, check

    def stop(self, handover: Handover) -> None:
        """Nobody wants to know any more, if it was under way at all."""
        self._checks.pop(handover.handover_id, None)

    def clear(self) -> None:
        self._checks.clear()

    def advance(self) -> tuple[Handover, str | None] | None:
        """The hand-over that has been looked at as a whole now, with what is wrong with it."""
        if not self._checks:
            return None
        handover_id, (handover, check) = next(iter(self._checks.items()))
        if not check.advance():
            return None
        del self._checks[handover_id]
        return handover, check.difference()

    def check_invariants(self, handovers: dict[str, Handover]) -> None:
        for handover_id, (handover, _) in self._checks.items():
            assert handovers.get(handover_id) is handover, handover
            assert not handover.read_ids, handover
