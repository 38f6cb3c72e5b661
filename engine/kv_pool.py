"""The KV cache: one region of memory cut into blocks, written by the model and read by transports."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.errors import KVPoolError
from kv_transfer.memory import HugePageRegion, PoolMemory, SharedRegion
from model_files import ModelConfig

NULL_BLOCK = 0
CPU = torch.device("cpu")
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block: [num_layers, block_size, 2 (key, value), num_kv_heads, head_dim] of `dtype`.

    `num_layers` counts the layers that attend. Where values are of another width than keys, a block is
    [num_layers, block_size, num_kv_heads * (head_dim + value_head_dim)]: keys of all heads, then values.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    """None: as wide as keys."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    @classmethod
    def of(
        cls, config: ModelConfig, block_size: int, dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> "KVLayout":
        return cls(config.num_layers, block_size, config.num_kv_heads, config.head_dim, dtype=dtype)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise KVPoolError(f"--block-size must be at least 1, got {self.block_size}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.dtype]

    @property
    def key_width(self) -> int:
        """Numbers of one token's keys in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_width(self) -> int:
        """Numbers of one token's keys and values in one layer."""
        return self.num_kv_heads * (self.head_dim + (self.value_head_dim or self.head_dim))

    @property
    def block_shape(self) -> tuple[int, ...]:
        if self.value_head_dim in (None, self.head_dim):
            return (self.num_layers, self.block_size, 2, self.num_kv_heads, self.head_dim)
        return (self.num_layers, self.block_size, self.token_width)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.block_size * self.token_width * self.torch_dtype.itemsize

    def __str__(self) -> str:
        """Equal texts mean exchangeable blocks, but for their size."""
        num_layers, _, *numbers = self.block_shape
        return f"{self.dtype}[{','.join(map(str, (num_layers, 'block_size', *numbers)))}]"


class KVPool:
    """`num_blocks` blocks in one contiguous huge-page region that lives as long as this object.

    Block 0 is the null block: padding points at it, nothing is kept in it. The memory must stay finite
    (it starts as zeros): rows that attention masks out are still multiplied by a weight of 0.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        memory: PoolMemory | None = None,
        device: torch.device = CPU,
    ) -> None:
        """`memory`: of the host; None takes memory of its own. Of another device it is torch's."""
        if num_blocks < 2:
            raise KVPoolError(
                f"the KV pool needs 2 blocks of {layout.block_bytes} bytes, one of them the null block, and "
                f"gets {num_blocks}; raise --kv-bytes or lower --block-size"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory: PoolMemory | None = None
        if device.type == "cpu":
            self.memory = memory or allocate(num_blocks * layout.block_bytes, "KV pool", "--kv-bytes")
            numbers = torch.from_numpy(self.memory.buffer).view(layout.torch_dtype)
        else:
            numbers = device_numbers(layout, num_blocks, device)
        self.tensor = numbers.view(num_blocks, *layout.block_shape)
        """[num_blocks, *layout.block_shape]"""
        self.token_rows = numbers.view(num_blocks * layout.num_layers * layout.block_size, -1)
        """The same memory, one row per (block, layer, token): keys of all heads, then their values."""
        self.layer_rows = numbers.view(num_blocks * layout.num_layers, -1)
        """The same memory, one row per (block, layer): `block_size` token rows after each other."""

    @classmethod
    def of_bytes(cls, layout: KVLayout, kv_bytes: int) -> "KVPool":
        """As many blocks as fit `kv_bytes`, the null block included; KVPoolError if that is no usable one."""
        return cls(layout, kv_bytes // layout.block_bytes)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def device_id(self) -> int | None:
        """Of the GPU whose memory it is; None: the host's."""
        device = self.tensor.device
        return None if device.type == "cpu" else device.index or 0

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def copy_block(self, source: int, destination: int) -> None:
        self.tensor[destination].copy_(self.tensor[source])

    def zero(self) -> None:
        self.tensor.zero_()

    def wait(self) -> None:
        """Until a device has done to the memory what it was told; the host's calls have when they return."""
        if self.device_id is not None:
            torch.cuda.synchronize(self.tensor.device)

    def check_invariants(self) -> None:
        assert self.tensor.data_ptr() == self.address
        assert self.tensor.is_contiguous()
        assert not self.tensor[NULL_BLOCK].isnan().any()


def device_numbers(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """The numbers of `num_blocks` blocks in a device's memory, zeros."""
    num_bytes = num_blocks * layout.block_bytes
    try:
        return torch.zeros(num_bytes // layout.torch_dtype.itemsize, dtype=layout.torch_dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise KVPoolError(f"{num_bytes} bytes do not fit the memory of {device}; lower --kv-bytes") from error


def allocate(num_bytes: int, what: str, option: str) -> HugePageRegion:
    """Memory for a pool; `KVPoolError` names the option where it does not fit."""
    check_available(num_bytes, what, option)
    try:
        return HugePageRegion(num_bytes)
    except (OSError, OverflowError) as error:
        raise KVPoolError(f"cannot map {num_bytes} bytes ({error}); lower {option}") from None


def share(num_bytes: int) -> SharedRegion:
    """Memory for the KV pool of another rank; `KVPoolError` where it does not fit."""
    check_available(num_bytes, "KV pool of a rank", "--kv-bytes")
    try:
        return SharedRegion.create(num_bytes)
    except (OSError, OverflowError) as error:
        raise KVPoolError(f"cannot share {num_bytes} bytes ({error}); lower --kv-bytes") from None


def check_available(num_bytes: int, what: str, option: str) -> None:
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise KVPoolError(
            f"the {what} of {num_bytes} bytes does not fit the {available} bytes of free memory; "
            f"lower {option}"
        )


def _available_bytes() -> int | None:
    """What this process may still take, by the machine and by its container; None where nobody says."""
    limits = [limit for limit in (_machine_bytes(), _container_bytes()) if limit is not None]
    return min(limits, default=None)


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024


def _container_bytes() -> int | None:
    try:
        return int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USAGE.read_text())
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return None
