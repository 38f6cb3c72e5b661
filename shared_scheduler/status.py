"""Where a sequence is in its life, and the words the outside sees when it ends."""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from wire.services import FinishReason


class SequenceStatus(IntEnum):
    """Ordered so that every finished status compares at or above `FINISHED_STOPPED`."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    """Kept for the wire; never entered."""
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_IGNORED = 6
    FINISHED_PREEMPTED = 7
    FINISHED_SO_FAILED = 8
    FINISHED_VE_FAILED = 9

    @property
    def is_finished(self) -> bool:
        return self >= SequenceStatus.FINISHED_STOPPED


FINISH_REASONS: Mapping[SequenceStatus, FinishReason] = MappingProxyType(
    {
        SequenceStatus.FINISHED_STOPPED: "stop",
        SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
        SequenceStatus.FINISHED_ABORTED: "abort",
        SequenceStatus.FINISHED_IGNORED: "prompt_length_exceeded",
        SequenceStatus.FINISHED_PREEMPTED: "insufficient_system_resource",
        SequenceStatus.FINISHED_SO_FAILED: "structured_output_failed",
        SequenceStatus.FINISHED_VE_FAILED: "vision_encoder_failed",
    }
)
