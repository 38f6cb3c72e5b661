"""What rank 0 and the other ranks of one engine tell each other: msgpack over ZMQ ipc sockets."""

import msgspec
import numpy as np
import numpy.typing as npt

from engine.config import KernelChoice
from engine.model_runner import Int32Array, IntArray, ModelBatch


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is started with, as JSON on its stdin."""

    rank: int
    size: int
    model: str
    weight_format: str
    kernels: KernelChoice
    max_positions: int
    block_size: int
    num_blocks: int
    num_threads: int
    pool_fd: int
    """An inherited descriptor of the memory of this rank's KV pool."""
    store_port: int
    """Where the ranks meet, on this machine."""
    timeout_s: float
    step_endpoint: str
    report_endpoint: str
    log_level: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """The arrays of a `ModelBatch` and the wanted rows, as int32 bytes."""

    token_ids: bytes
    positions: bytes
    slot_mapping: bytes
    seqlens_q: bytes
    seqlens_k: bytes
    block_tables: bytes
    logit_rows: bytes

    @classmethod
    def of(cls, batch: ModelBatch, logit_rows: IntArray) -> "Step":
        arrays = (
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.seqlens_q,
            batch.seqlens_k,
            batch.block_tables,
            logit_rows,
        )
        return cls(*(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays))


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class Here(msgspec.Struct, frozen=True, tag=True):
    """This rank's process runs and is about to connect to the others."""

    rank: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """This rank has its weights and waits for steps."""

    rank: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot start, or cannot go on."""

    rank: int
    message: str


ToRank = Step | Stop
ToFirst = Here | Loaded | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_decode_to_first: msgspec.msgpack.Decoder[ToFirst] = msgspec.msgpack.Decoder(ToFirst)


def encode(message: ToRank | ToFirst) -> bytes:
    return _encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    return _decode_to_rank.decode(frame)


def decode_to_first(frame: bytes) -> ToFirst:
    return _decode_to_first.decode(frame)


class StepBatch:
    """A `ModelBatch` out of a `Step`; the arrays are views of the message."""

    def __init__(self, step: Step) -> None:
        self.token_ids = _array(step.token_ids)
        self.positions = _array(step.positions)
        self.slot_mapping = _array(step.slot_mapping)
        self.seqlens_q = _array(step.seqlens_q)
        self.seqlens_k = _array(step.seqlens_k)
        self.block_tables = _array(step.block_tables).reshape(len(self.seqlens_q), -1)
        self.logit_rows: npt.NDArray[np.integer] = _array(step.logit_rows)


def _array(data: bytes) -> Int32Array:
    return np.frombuffer(data, np.int32)
