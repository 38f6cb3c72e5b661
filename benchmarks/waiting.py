"""What it costs a prompt step to keep the waiting requests in the order of a policy, in thread-CPU time.

A PROMPT engine with a prefix cache and so many requests waiting; in every step 4 are admitted and 4 arrive.
Prompts are one of 32 common beginnings of 512 tokens and 512 of their own, in blocks of 16. Timed is all that
the queue does, and what the radix tree does to follow the prompts of those who wait. In the first steps the
common beginnings become known, and each changes the match of all who share it: that is the worst step. SGLang
sorts: 3 to 6 ms at 128 waiting, where it gives its `lpm` up.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.report import Report, argument_parser
from shared_scheduler import EngineType, Scheduler, SchedulerConfig, Sequence, WaitingPolicy
from wire.sampling import SamplingParams

BLOCK_SIZE = 16
NUM_SHARED, NUM_OWN, NUM_BEGINNINGS = 512, 512, 32
NUM_ADMITTED = 4
WAITING = (128, 512, 4096)
TOKEN_ID = 7


def requests(max_tokens_seed: int = 0) -> Iterator[Sequence]:
    """For ever."""
    random = np.random.default_rng(max_tokens_seed)
    beginnings = random.integers(0, 50_000, (NUM_BEGINNINGS, NUM_SHARED), np.int32)
    number = 0
    while True:
        beginning = int(random.integers(NUM_BEGINNINGS))
        own = random.integers(0, 50_000, NUM_OWN, np.int32)
        yield Sequence(
            str(number),
            np.concatenate([beginnings[beginning], own]),
            SamplingParams(max_tokens=int(random.integers(1, 1000))),
            block_size=BLOCK_SIZE,
            priority=int(random.integers(10)),
            routing_key=str(beginning),
        )
        number += 1


class Stopwatch:
    """Thread-CPU time of wrapped methods; a call from one into another counts once."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._is_running = False

    def wrap(self, owner: object, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if self._is_running:
                return method(*arguments)
            self._is_running = True
            start_ns = time.thread_time_ns()
            try:
                return method(*arguments)
            finally:
                self.total_ns += time.thread_time_ns() - start_ns
                self._is_running = False

        return call


def ordering_times_us(policy: WaitingPolicy, num_waiting: int, num_steps: int) -> list[float]:
    """Of `num_steps` steps once the queue is full; the age limit never strikes."""
    scheduler = Scheduler(
        SchedulerConfig(
            engine_type=EngineType.PROMPT,
            block_size=BLOCK_SIZE,
            num_blocks=20_000,
            max_num_seqs=NUM_ADMITTED,
            max_num_batched_tokens=NUM_ADMITTED * (NUM_SHARED + NUM_OWN),
            max_model_len=NUM_SHARED + NUM_OWN + 1000,
            prefix_cache=True,
            waiting_policy=policy,
            waiting_age_limit=1_000_000,
        )
    )
    source = requests()
    for _ in range(num_waiting - NUM_ADMITTED):
        scheduler.add_sequence(next(source), 0.0)
    watch = Stopwatch()
    queue, cache = scheduler._queues.waiting, scheduler._holdings.reuse.cache
    watch.wrap(queue, "append", "extendleft", "head", "popleft", "end_step", "computed", "ended")
    assert cache is not None
    watch.wrap(cache.tree, "_settle")
    times = []
    for _ in range(num_steps):
        watch.total_ns = 0
        for _ in range(NUM_ADMITTED):
            scheduler.add_sequence(next(source), 0.0)
        outputs = scheduler.schedule()
        token_ids = np.full(len(outputs.sequences), TOKEN_ID, np.int64)
        results = scheduler.process_outputs(outputs, token_ids, now_s=0.0)
        for sequence in results.prompts_done:
            scheduler.release_handover(sequence)
        times.append(watch.total_ns / 1e3)
    return times


def add_rows(report: Report, num_steps: int) -> None:
    """Every policy at every length of the queue."""
    for num_waiting in WAITING:
        for policy in WaitingPolicy:
            times = ordering_times_us(policy, num_waiting, num_steps)
            case = f"{policy.value}, {num_waiting:,} waiting"
            report.add(case, "10th percentile", float(np.percentile(times, 10)), "us/step")
            report.add(case, "median", float(np.median(times)), "us/step")
            report.add(case, "worst", max(times), "us/step")


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each case")
    arguments = parser.parse_args()
    report = Report("waiting")
    add_rows(report, arguments.steps)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
