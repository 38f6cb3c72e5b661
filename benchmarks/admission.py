"""What the admission estimate of a COMPLETION engine is worth when its pool is too small for its clients.

The real scheduler, a virtual clock. So many clients ask one request after the other; prompts and answers are
as long as in the Azure 2023 conversation trace, and a step takes as long as DistServe measured for OPT-13B on
an A100. The pool holds half of what the clients take up where it is ample. Measured with the estimate on and
off: requests that ended with `insufficient_system_resource`, and output tokens per second: those of requests
that were answered, and all.
"""

import csv
import gzip
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.report import Report, argument_parser
from shared_scheduler import AllocStatus, EngineType, Scheduler, SchedulerConfig, Sequence, SequenceStatus
from wire.sampling import SamplingParams

LENGTHS = Path(__file__).parent.parent / "tests" / "data" / "traces" / "azure_conv_lengths.csv.gz"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
EOS, TOKEN = 2, 7
PULL_S_PER_TOKEN = 20e-6
"""A pull of 800 KiB a token at 40 GB/s."""
LIMITS = ("exact", "loose", "2048")
"""How `max_tokens` is chosen: the very length of the answer; 1 to 8 times that; one number for all."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request: prompt and answer in tokens, and what the client allows."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int


def step_s(num_sequences: int, num_context_tokens: int) -> float:
    """A decode step of OPT-13B on one A100-80G, as DistServe fitted it (LLMServe/DistServe 82831f1)."""
    if num_sequences < 95:
        return (19.93 + 0.000627 * num_context_tokens + 0.0385 * num_sequences) / 1e3
    return (7.166 + 0.00058 * num_context_tokens + 0.1583 * num_sequences) / 1e3


def works(limits: str, seed: int = 0) -> Iterator[Work]:
    """Requests of the trace, in a random order, for ever."""
    chance = Random(seed)
    with gzip.open(LENGTHS, "rt") as rows:
        lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(rows)]
    lengths = [(prompt, output) for prompt, output in lengths if prompt + output < MAX_MODEL_LEN]
    while True:
        prompt, output = chance.choice(lengths)
        match limits:
            case "exact":
                limit = output
            case "loose":
                limit = int(output * chance.uniform(1, 8)) + 1
            case _:
                limit = max(int(limits), output)
        yield Work(prompt, max(output, 2), max(limit, 2))


@dataclass(slots=True)
class Outcome:
    num_answered: int = 0
    num_killed: int = 0
    num_tokens: int = 0
    num_answered_tokens: int = 0
    clock_s: float = 0.0
    used_blocks: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.clock_s

    @property
    def answered_rate(self) -> float:
        """Output tokens per second of requests that were not killed."""
        return self.num_answered_tokens / self.clock_s

    @property
    def mean_used(self) -> float:
        return float(np.mean(self.used_blocks))


class Engine:
    """A COMPLETION engine whose clients always want something."""

    def __init__(self, config: SchedulerConfig, num_clients: int, source: Iterator[Work]) -> None:
        self._scheduler = Scheduler(config)
        self._source = source
        self._num_clients = num_clients
        self._offered: deque[tuple[Sequence, Work]] = deque()
        self._pulled: list[tuple[float, Sequence]] = []
        self._works: dict[str, Work] = {}
        self._num_requests = 0
        self.outcome = Outcome()

    def run(self, num_requests: int) -> Outcome:
        outcome = self.outcome
        for _ in range(self._num_clients):
            self._offer()
        while outcome.num_answered + outcome.num_killed < num_requests:
            self._reserve()
            self._admit()
            self._step()
        return outcome

    def _offer(self) -> None:
        work = next(self._source)
        self._num_requests += 1
        sequence = Sequence(
            str(self._num_requests),
            np.full(work.num_prompt_tokens, TOKEN, np.int32),
            SamplingParams(max_tokens=work.max_tokens),
            block_size=BLOCK_SIZE,
        )
        self._offered.append((sequence, work))

    def _reserve(self) -> None:
        """In order of arrival, until one has to wait."""
        while self._offered:
            sequence, work = self._offered[0]
            status = self._scheduler.reserve_remote(sequence, self.outcome.clock_s)
            if status is AllocStatus.LATER:
                return
            assert status is AllocStatus.OK
            self._offered.popleft()
            self._works[sequence.request_id] = work
            ready_s = self.outcome.clock_s + work.num_prompt_tokens * PULL_S_PER_TOKEN
            self._pulled.append((ready_s, sequence))

    def _admit(self) -> None:
        now_s = self.outcome.clock_s
        arrived = [sequence for ready_s, sequence in self._pulled if ready_s <= now_s]
        self._pulled = [(ready_s, sequence) for ready_s, sequence in self._pulled if ready_s > now_s]
        for sequence in arrived:
            self._scheduler.admit_arrived(sequence, TOKEN)

    def _step(self) -> None:
        outcome, scheduler = self.outcome, self._scheduler
        outputs = scheduler.schedule()
        for sequence in (*outputs.finished, *outputs.ignored):
            self._end(sequence)
        if outputs.batch is None:
            scheduler.process_outputs(outputs, np.empty(0, np.int64), now_s=outcome.clock_s)
            outcome.clock_s = max(min((ready_s for ready_s, _ in self._pulled), default=0.0), outcome.clock_s)
            return
        batch = outputs.batch
        outcome.clock_s += step_s(batch.num_sequences, int(batch.seqlens_k.sum()))
        outcome.num_tokens += batch.num_sequences
        outcome.used_blocks.append(scheduler.num_usable_blocks - scheduler.num_free_blocks)
        lengths = np.array([self._works[s.request_id].num_output_tokens for s in outputs.sequences])
        token_ids = np.where(batch.output_indices + 1 >= lengths, EOS, TOKEN).astype(np.int64)
        results = scheduler.process_outputs(outputs, token_ids, now_s=outcome.clock_s)
        for sequence in results.finished:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.FINISHED_PREEMPTED:
            self.outcome.num_killed += 1
        else:
            self.outcome.num_answered += 1
            self.outcome.num_answered_tokens += sequence.num_output_tokens
        del self._works[sequence.request_id]
        self._offer()


def run(limits: str, num_clients: int, num_requests: int, num_blocks: int, *, estimate: bool) -> Outcome:
    """So many requests to their ends in a pool of `num_blocks`."""
    config = SchedulerConfig(
        engine_type=EngineType.COMPLETION,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + 1,
        max_num_seqs=num_clients,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
        admission_estimate=estimate,
    )
    return Engine(config, num_clients, works(limits)).run(num_requests)


def compare(report: Report, limits: str, num_clients: int, num_requests: int) -> None:
    """Estimate off and on in half of an ample pool; everything in relation to off."""
    ample = run(limits, num_clients, num_requests, MAX_MODEL_LEN // BLOCK_SIZE * num_clients, estimate=False)
    num_blocks = int(ample.mean_used / 2)
    off = run(limits, num_clients, num_requests, num_blocks, estimate=False)
    on = run(limits, num_clients, num_requests, num_blocks, estimate=True)
    for name, outcome in (("off", off), ("on", on)):
        case = f"max_tokens {limits}, {num_clients} clients, estimate {name}"
        report.add(case, "killed", outcome.num_killed, "requests", off.num_killed)
        report.add(case, "tokens answered", outcome.answered_rate, "1/s", off.answered_rate)
        report.add(case, "tokens, all", outcome.rate, "1/s", off.rate)
        report.add(case, "pool used", outcome.mean_used / num_blocks, "")


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--requests", type=int, default=3000, help="requests that end in each run")
    arguments = parser.parse_args()
    report = Report("admission")
    for limits in LIMITS:
        for num_clients in (32, 128):
            compare(report, limits, num_clients, arguments.requests)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
