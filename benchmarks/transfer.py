"""Both transports against memcpy, by block size and total: `python -m benchmarks.transfer [--json FILE]`.

A second process serves a pool; this one reads scattered blocks of it into its own. `rate` is compared with
memcpy over the same blocks, taken in turn with it; `cpu` is what both processes spend for each GB.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report, argument_parser
from kv_transfer.errors import TransportUnavailable
from kv_transfer.layout import BlockIds, Region
from kv_transfer.memory import HugePageRegion
from kv_transfer.pump import BUSY_S
from kv_transfer.transport import BlockRead, Connection, RemoteMemory, Transport
from kv_transfer.transports import make_transport
from processes.heap import keep_freed_memory

KIB, MIB = 1 << 10, 1 << 20
GB = 1e9

BLOCK_BYTES = (64 * KIB, 256 * KIB, MIB, 1434 * KIB)
TOTAL_BYTES = (16 * MIB, 256 * MIB)
LATENCY_BLOCK_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True)
class Path:
    """A way from process to process; `ucx_tls` confines NIXL to it."""

    name: str
    transport: str
    address: str
    ucx_tls: str | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Median wall seconds and mean CPU seconds of one copy."""

    wall_s: float
    cpu_s: float


class Pool:
    """A destination, or a source, of `total_bytes` in blocks after the null block."""

    def __init__(self, block_bytes: int, total_bytes: int) -> None:
        self.num_blocks = total_bytes // block_bytes + 1
        self._memory = HugePageRegion(self.num_blocks * block_bytes)
        self._memory.buffer[:] = 1  # every page is there before it is timed
        self.blocks: npt.NDArray[np.uint8] = self._memory.buffer.reshape(self.num_blocks, block_bytes)
        self.region = Region("kv", self._memory.address, block_bytes, self.num_blocks)


class SourceProcess:
    """This module again, serving a pool."""

    def __init__(self, path: Path, block_bytes: int, total_bytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer", "--serve", path.transport, path.address]
        self._process = subprocess.Popen(
            [*command, str(block_bytes), str(total_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        blob, region = json.loads(self._answer())
        self.memory = RemoteMemory(bytes.fromhex(blob), (Region(*region),), path.address)

    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the source process has ended")
        return line

    def close(self) -> None:
        self._process.communicate(timeout=30)


def serve(transport_name: str, address: str, block_bytes: int, total_bytes: int) -> None:
    pool = Pool(block_bytes, total_bytes)
    transport = make_transport(transport_name)
    blob = transport.register([pool.region], address)
    print(json.dumps([blob.hex(), dataclasses.astuple(pool.region)]), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    transport.close()


@contextmanager
def connected(
    path: Path, pool: Pool, block_bytes: int, total_bytes: int
) -> Iterator[tuple[Connection, SourceProcess]]:
    with _ucx_tls(path.ucx_tls):
        transport: Transport = make_transport(path.transport)
        source = SourceProcess(path, block_bytes, total_bytes)
        transport.register([pool.region], None)
        connection = transport.connect(source.memory)
    yield connection, source
    connection.close()
    transport.close()
    source.close()


@contextmanager
def _ucx_tls(value: str | None) -> Iterator[None]:
    before = os.environ.get("UCX_TLS")
    if value is not None:
        os.environ["UCX_TLS"] = value
    yield
    if value is not None:
        del os.environ["UCX_TLS"]
        if before is not None:
            os.environ["UCX_TLS"] = before


def read(connection: Connection, remote: BlockIds, local: BlockIds) -> None:
    """One read, waited for as the hand-over's pump does."""
    connection.read([BlockRead(0, remote, local)])
    while True:
        results = connection.poll()
        if results:
            if results[0].error is not None:
                raise RuntimeError(results[0].error)
            return
        if connection.waitable is not None:
            connection.waitable.poll(100)
        else:
            time.sleep(BUSY_S)


class Clocks:
    """Wall time and CPU time of a thing done several times."""

    def __init__(self) -> None:
        self._walls: list[float] = []
        self._cpu_s = 0.0

    @contextmanager
    def time(self, source: SourceProcess | None = None) -> Iterator[None]:
        """CPU of this process and, if given, of the source."""
        cpu_s = time.process_time() + (source.cpu_s() if source else 0.0)
        start_s = time.perf_counter()
        yield
        self._walls.append(time.perf_counter() - start_s)
        self._cpu_s += time.process_time() + (source.cpu_s() if source else 0.0) - cpu_s

    @property
    def cost(self) -> Cost:
        return Cost(statistics.median(self._walls), self._cpu_s / len(self._walls))


def measure(
    path: Path, block_bytes: int, total_bytes: int, ids: tuple[BlockIds, BlockIds], repeats: int
) -> tuple[Cost, Cost]:
    """Memcpy and the path over the same blocks, in turn, so that both see the same machine."""
    local_source, target = Pool(block_bytes, total_bytes), Pool(block_bytes, total_bytes)
    pairs = list(zip(*(item.tolist() for item in ids), strict=True))
    copies, reads = Clocks(), Clocks()
    with connected(path, target, block_bytes, total_bytes) as (connection, source):
        read(connection, *ids)
        for _ in range(repeats):
            with copies.time():
                for remote_id, local_id in pairs:
                    target.blocks[local_id] = local_source.blocks[remote_id]
            with reads.time(source):
                read(connection, *ids)
    return copies.cost, reads.cost


def measure_latency_us(path: Path, repeats: int) -> float:
    """Median time of a read of one block of 4 KiB."""
    target = Pool(LATENCY_BLOCK_BYTES, 64 * LATENCY_BLOCK_BYTES)
    with connected(path, target, LATENCY_BLOCK_BYTES, 64 * LATENCY_BLOCK_BYTES) as (connection, _):
        walls = []
        for index in range(repeats):
            one = np.array([index % 64 + 1], dtype=np.int32)
            start_s = time.perf_counter()
            read(connection, one, one)
            walls.append(time.perf_counter() - start_s)
        return statistics.median(walls) * 1e6


def paths(directory: str) -> list[Path]:
    tcp = "tcp://127.0.0.1:0"
    found = [Path("zmq tcp", "zmq", tcp), Path("zmq ipc", "zmq", f"ipc://{directory}/c")]
    try:
        make_transport("nixl")
    except TransportUnavailable as error:
        print(error, file=sys.stderr)
        return found
    return [Path("nixl", "nixl", tcp), Path("nixl tcp", "nixl", tcp, ucx_tls="tcp"), *found]


def run(report: Report, repeats: int, totals: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        for total_bytes in totals:
            for block_bytes in BLOCK_BYTES:
                every = np.arange(1, total_bytes // block_bytes + 1, dtype=np.int32)
                scattered = random.permutation(every), random.permutation(every)
                _compare(report, paths(directory), block_bytes, total_bytes, scattered, repeats, "scattered")
            _compare(report, paths(directory), MIB, total_bytes, _whole(total_bytes), repeats, "contiguous")
        for path in paths(directory):
            report.add(f"{path.name}, 4K block", "latency", measure_latency_us(path, 200), "us")


def _whole(total_bytes: int) -> tuple[BlockIds, BlockIds]:
    every = np.arange(1, total_bytes // MIB + 1, dtype=np.int32)
    return every, every


def _compare(
    report: Report,
    candidates: list[Path],
    block_bytes: int,
    total_bytes: int,
    ids: tuple[BlockIds, BlockIds],
    repeats: int,
    order: str,
) -> None:
    gigabytes = ids[0].size * block_bytes / GB
    label = f"{block_bytes // KIB}K {order} {total_bytes // MIB}M"
    for path in candidates:
        copied, moved = measure(path, block_bytes, total_bytes, ids, repeats)
        case = f"{path.name}, {label}"
        report.add(case, "rate", gigabytes / moved.wall_s, "GB/s", gigabytes / copied.wall_s)
        report.add(case, "cpu", moved.cpu_s / gigabytes, "s/GB", copied.cpu_s / gigabytes)


def main() -> None:
    keep_freed_memory()  # as engines do
    parser = argument_parser("Both transports against memcpy")
    parser.add_argument("--repeats", type=int, default=5, help="timed copies for each row")
    parser.add_argument("--quick", action="store_true", help="16 MiB only")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        transport, address, block_bytes, total_bytes = arguments.serve
        serve(transport, address, int(block_bytes), int(total_bytes))
        return
    report = Report("transfer")
    run(report, arguments.repeats, TOTAL_BYTES[:1] if arguments.quick else TOTAL_BYTES)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
