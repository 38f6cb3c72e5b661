"""What the engine hears from a hand-over."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kv_transfer.messages import ChoiceStart

EndReason = Literal["released", "abandoned", "expired", "withdrawn"]

FailReason = Literal[
    "peer_lost",
    "connect_failed",
    "peer_paused",
    "self_test_failed",
    "incompatible",
    "wrong_engine",
    "withdrawn",
    "expired",
    "abandoned",
    "superseded",
    "refused",
    "offer_timeout",
    "bad_offer",
    "bad_pull",
    "read_failed",
    "corrupt",
    "read_timeout",
    "confirm_timeout",
    "closed",
]


@dataclass(frozen=True, slots=True)
class Released:
    """Source: no reader holds this hand-over any more; its blocks and slot may be freed.

    `released`: a reader has all of it. `abandoned`: the reader gave up. `expired`: nobody renewed the lease.
    `withdrawn`: the engine took it back and no reader holds it now.
    """

    handover_id: str
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Asked:
    """Source: a reader would borrow what is cached of these tokens from `first_token` on.

    Answer with `offer`, of the blocks from there on, or with `withdraw`.
    """

    handover_id: str
    token_ids: npt.NDArray[np.int32]
    first_token: int
    cache_salt: str


SourceEvent: TypeAlias = Released | Asked


@dataclass(frozen=True, slots=True)
class Offered:
    """Sink: the prompt is computed, or the first part of it; allocate `num_blocks`, or fewer, and `pull`."""

    handover_id: str
    num_tokens: int
    """Of the whole prompt, as is `num_blocks`."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Sink, final: every read is in and the source confirmed that its blocks were valid throughout."""

    handover_id: str
    first_tokens: tuple[ChoiceStart, ...]
    """Of the choices that go on, by the prompt engine."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Sink: the hand-over will not happen. Final if `blocks_safe`, else `Reclaimable` follows.

    Until then a read may still write to the destination blocks: they must not be given to anyone.
    """

    handover_id: str
    reason: FailReason
    message: str
    blocks_safe: bool


@dataclass(frozen=True, slots=True)
class Reclaimable:
    """Sink, final: after `abandon` or an unsafe `Failed`; nothing can write to the destination any more."""

    handover_id: str


SinkEvent: TypeAlias = Offered | Arrived | Failed | Reclaimable
