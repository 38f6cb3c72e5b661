"""What a scheduling step costs: schedule(), the batch arrays and process_outputs(), in thread-CPU time.

Decode steps at several numbers of running sequences (prompts of about 512 tokens, block 16, one block taken
per sequence every 16 steps), and prompt steps with 64 waiting prompts of 2,048 tokens. The baseline of every
row is a fixed pure-Python loop timed in the same run: ratios can be compared between machines.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Report, argument_parser
from shared_scheduler import EngineType, Scheduler, SchedulerConfig, Sequence, StepResults
from wire.sampling import SamplingParams

BLOCK_SIZE = 16
DECODE_SIZES = (64, 256, 1024, 4096)
NUM_WAITING = 64
PROMPT_LENGTH = 2048
CALIBRATION_LOOPS = 10_000
TOKEN_ID = 7


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of thread-CPU time per step."""

    median: float
    p10: float

    @classmethod
    def of(cls, steps: Iterator[Callable[[], object]]) -> "Timing":
        """Time each of the given calls."""
        times = []
        for run in steps:
            start = time.thread_time_ns()
            run()
            times.append((time.thread_time_ns() - start) / 1e3)
        return cls(float(np.median(times)), float(np.percentile(times, 10)))


def calibrate(num_runs: int = 50) -> Timing:
    """`CALIBRATION_LOOPS` additions in a plain loop."""

    def loop() -> int:
        total = 0
        for i in range(CALIBRATION_LOOPS):
            total += i & 7
        return total

    return Timing.of(loop for _ in range(num_runs))


def step(scheduler: Scheduler) -> StepResults:
    """One synchronous step; everybody samples the same id."""
    outputs = scheduler.schedule()
    token_ids = np.full(len(outputs.sequences), TOKEN_ID, np.int64)
    return scheduler.process_outputs(outputs, token_ids, now_s=0.0)


def time_decode(num_sequences: int, num_steps: int) -> Timing:
    """All sequences run from the first measured step to the last."""
    prompt_blocks, output_blocks = 512 // BLOCK_SIZE, num_steps // BLOCK_SIZE + 2
    scheduler = make_scheduler(
        EngineType.NORMAL, num_sequences, num_sequences * (prompt_blocks + output_blocks), 512 * num_sequences
    )
    lengths = np.random.default_rng(0).integers(448, 513, num_sequences).tolist()
    add_prompts(scheduler, lengths, max_tokens=num_steps + 2)
    step(scheduler)
    assert scheduler.num_running == num_sequences
    timing = Timing.of((lambda: step(scheduler)) for _ in range(num_steps))
    assert scheduler.num_running == num_sequences
    return timing


def time_prompt(num_admitted: int, num_steps: int) -> Timing:
    """Steps that take `num_admitted` of 64 waiting prompts; between them the queue is filled up again."""
    blocks = NUM_WAITING * PROMPT_LENGTH // BLOCK_SIZE
    scheduler = make_scheduler(EngineType.PROMPT, NUM_WAITING, blocks, num_admitted * PROMPT_LENGTH)
    results: list[StepResults] = []

    def filled_up() -> Iterator[Callable[[], object]]:
        for number in range(num_steps):
            add_prompts(scheduler, [PROMPT_LENGTH] * (NUM_WAITING - scheduler.num_waiting), 9, f"{number}-")
            yield lambda: results.append(step(scheduler))
            assert len(results[-1].prompts_done) == num_admitted
            for sequence in results[-1].prompts_done:
                scheduler.release_handover(sequence)

    return Timing.of(filled_up())


def make_scheduler(
    engine_type: EngineType, num_sequences: int, num_blocks: int, num_batched_tokens: int
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            engine_type=engine_type,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks + 1,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_batched_tokens,
            max_model_len=8192,
            eos_token_ids=(2,),
        )
    )


def add_prompts(scheduler: Scheduler, lengths: list[int], max_tokens: int, prefix: str = "") -> None:
    for number, length in enumerate(lengths):
        tokens = np.arange(3, 3 + length, dtype=np.int32)
        sampling = SamplingParams(max_tokens=max_tokens)
        scheduler.add_sequence(Sequence(f"{prefix}{number}", tokens, sampling, block_size=BLOCK_SIZE), 0.0)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=400, help="measured steps of each case")
    arguments = parser.parse_args()
    report = Report("scheduler")
    loop = calibrate()
    report.add("pure-Python loop", "median", loop.median, "us")
    for size in DECODE_SIZES:
        timing = time_decode(size, arguments.steps)
        case = f"decode, {size:,} running"
        report.add(case, "median", timing.median, "us/step", loop.median)
        report.add(case, "10th percentile", timing.p10, "us/step", loop.median)
        report.add(case, "10th percentile", timing.p10 / size, "us/step/sequence", loop.median)
    for admitted in (4, NUM_WAITING):
        timing = time_prompt(admitted, max(arguments.steps // 10, 10))
        case = f"prompt, {admitted} of {NUM_WAITING} waiting x {PROMPT_LENGTH:,} tokens"
        report.add(case, "median", timing.median, "us/step", loop.median)
        report.add(case, "10th percentile", timing.p10, "us/step", loop.median)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
