"""What sharing a model out to two processes costs: sums over gloo, and the head split or whole at rank 0.

Two ranks with one thread each and a head of SmolLM2-135M's size in fp16w. `split`: each rank multiplies its
half of the vocabulary, rank 0 gathers; `whole`: rank 0 multiplies all of it while rank 1 waits.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, but the stubs do not say so
    TCPStore,
)

from benchmarks.report import Report, argument_parser
from engine.model.linear import make_linear
from engine.model.shards import GatheredHead, Shard, vocabulary_part
from engine.tensor_parallel.collectives import LOOPBACK, RankCollectives

VOCAB, HIDDEN, SIZE = 49152, 576, 2
NUM_ROWS = (1, 16, 64)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ours, theirs = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=run, args=(1, store.port, arguments.repeats, theirs))
    other.start()
    found = measure(0, store, arguments.repeats)
    assert ours.recv() is None
    other.join()
    report = Report("tensor_parallel")
    for num_rows, (split_s, whole_s, sum_s) in found.items():
        report.add(f"{num_rows} rows", "head, split", split_s * 1e3, "ms", whole_s * 1e3)
        report.add(f"{num_rows} rows", f"sum of [{num_rows}, {HIDDEN}]", sum_s * 1e3, "ms")
    report.finish(arguments.json)


def run(rank: int, port: int, repeats: int, done: Connection) -> None:
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    measure(rank, store, repeats)
    done.send(None)


def measure(rank: int, store: TCPStore, repeats: int) -> dict[int, tuple[float, float, float]]:
    """Median seconds of a split head, a whole one and a sum, by number of rows."""
    torch.set_num_threads(1)
    collectives = RankCollectives.connect(store, rank, SIZE, timeout_s=60.0, device=torch.device("cpu"))
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.02
    part = make_linear(vocabulary_part(weight, Shard(rank, SIZE)), None, "fp16w")
    split, whole = GatheredHead(part, VOCAB, collectives), make_linear(weight, None, "fp16w")

    def together(work: Callable[[], object]) -> float:
        collectives.sum_(torch.zeros(1))
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    found = {}
    for num_rows in NUM_ROWS:
        rows = torch.randn(num_rows, HIDDEN)
        timed = [
            (
                together(partial(split, rows)),
                together(partial(whole, rows)) if rank == 0 else together(lambda: None),
                together(partial(collectives.sum_, rows.clone())),
            )
            for _ in range(repeats)
        ]
        split_s, whole_s, sum_s = (statistics.median(times) for times in zip(*timed, strict=True))
        found[num_rows] = split_s, whole_s, sum_s
    return found


if __name__ == "__main__":
    main()
