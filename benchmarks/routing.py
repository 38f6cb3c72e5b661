"""The proxy's pairing policies on a trace, in virtual time: what is found cached, how long clients wait.

The decisions are `proxy.pairing.choose_route` itself, over the knowledge that a proxy has: tokens of open
legs, and an index of what was sent where, which engines correct when they evict. Simulated are the engines:

- a prompt engine computes one prompt after the other at a fixed rate and keeps blocks, the last used longest
- a completion engine decodes all its streams together, a step takes longer the more there are

Requests are those of a Mooncake trace in its order, with the lengths of answers of an Azure trace; they
arrive at random with the mean rate that keeps the prompt engines busy for `--load` of the time if nothing
were cached. The second block of a prompt, the first one that is not common to all, stands for its session.
"""

import csv
import gzip
import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from benchmarks.report import Report, argument_parser
from benchmarks.traces import BLOCK_TOKENS, TRACES, read_trace
from proxy.fleet import Engine, FleetSnapshot
from proxy.loads import STREAM_TOKENS
from proxy.pairing import Knowledge, Pair, PairingRules, choose_route
from proxy.prefix_index import PrefixIndex
from proxy.role_policies import POLICIES, Ask
from wire.cache import CacheEvent
from wire.services import EngineInfo, EngineRole

PREFILL_TOKENS_PER_S = 10_000.0
STEP_S, STEP_S_PER_STREAM = 0.020, 0.0005
CACHE_TOKENS = 1_000_000
"""Of each prompt engine."""


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    block_ids: tuple[int, ...]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.block_ids) * BLOCK_TOKENS

    @property
    def names(self) -> list[str]:
        return [str(block_id) for block_id in self.block_ids]


@dataclass(slots=True)
class SimulatedPromptEngine:
    engine: Engine
    free_at_s: float = 0.0
    cached: OrderedDict[str, None] = field(default_factory=OrderedDict)
    num_computed_tokens: int = 0

    def prefill(self, request: Request, now_s: float) -> tuple[float, int, list[str]]:
        """When the first token is out, the tokens that were cached, and the blocks that had to go."""
        names = request.names
        num_hits = next((place for place, name in enumerate(names) if name not in self.cached), len(names))
        # The last token is always computed.
        num_cached = min(num_hits * BLOCK_TOKENS, request.num_tokens - 1)
        self.num_computed_tokens += request.num_tokens - num_cached
        self.free_at_s = max(now_s, self.free_at_s) + (request.num_tokens - num_cached) / PREFILL_TOKENS_PER_S
        for name in names:
            self.cached[name] = None
            self.cached.move_to_end(name)
        num_over = len(self.cached) - CACHE_TOKENS // BLOCK_TOKENS
        evicted = [self.cached.popitem(last=False)[0] for _ in range(max(0, num_over))]
        return self.free_at_s, num_cached, evicted


@dataclass(slots=True)
class SimulatedCompletionEngine:
    left: dict[int, float] = field(default_factory=dict)
    """Tokens that each stream still gets."""
    at_s: float = 0.0

    def advance(self, now_s: float) -> None:
        num_steps = (now_s - self.at_s) / self.step_s
        self.left = {stream: left - num_steps for stream, left in self.left.items()}
        self.at_s = now_s

    @property
    def step_s(self) -> float:
        return STEP_S + STEP_S_PER_STREAM * len(self.left)

    def next_end(self) -> tuple[float, int] | None:
        """When the next stream ends if none comes before, and which one."""
        if not self.left:
            return None
        stream = min(self.left, key=self.left.__getitem__)
        return self.at_s + max(0.0, self.left[stream]) * self.step_s, stream


@dataclass(slots=True)
class Outcome:
    first_token_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """Mean time between tokens of each answer."""
    cached_share: float = 0.0
    imbalance: float = 0.0
    """Tokens that the busiest prompt engine computed, of the mean of all."""


class Simulation:
    """One run of all requests through a fleet; `run` once."""

    def __init__(self, rules: PairingRules, num_prompt: int, num_completion: int, seed: int) -> None:
        self._rules = rules
        self._prompts = {e.url: SimulatedPromptEngine(e) for e in _engines("prompt", num_prompt)}
        completions = _engines("completion", num_completion)
        self._completions = {engine.url: SimulatedCompletionEngine() for engine in completions}
        self._fleet = FleetSnapshot((*(p.engine for p in self._prompts.values()), *completions))
        self._index = PrefixIndex()
        self._queued: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._turns = count()
        self._events: list[tuple[float, int, str, int]] = []
        """(time, tie-breaker, what, request or 0) where what is `first` or the URL of a completion engine."""
        self._ties = count()
        self._pairs: dict[int, Pair] = {}

    def run(self, requests: Sequence[Request]) -> Outcome:
        outcome, num_cached_tokens = Outcome(), 0
        first_at: dict[int, float] = {}
        for number, request in enumerate(requests):
            self._pass_until(request.arrival_s, requests, first_at, outcome)
            pair = self._pairs[number] = self._choose(request)
            self._index.insert(request.names, [pair.prompt.start])
            ready_s, num_cached, evicted = self._prompts[pair.prompt.url].prefill(request, request.arrival_s)
            self._index.apply(pair.prompt.start, CacheEvent(kind="removed", names=tuple(evicted)))
            num_cached_tokens += num_cached
            first_at[number] = ready_s
            outcome.first_token_s.append(ready_s - request.arrival_s)
            self._queued[pair.prompt.url] += request.num_tokens
            self._queued[pair.completion.url] += request.num_tokens + STREAM_TOKENS
            self._at(ready_s, "first", number)
        self._pass_until(float("inf"), requests, first_at, outcome)
        computed = [prompt.num_computed_tokens for prompt in self._prompts.values()]
        outcome.imbalance = max(computed) / (sum(computed) / len(computed))
        outcome.cached_share = num_cached_tokens / sum(request.num_tokens for request in requests)
        return outcome

    def _choose(self, request: Request) -> Pair:
        found = self._index.num_cached(request.names, [p.engine.start for p in self._prompts.values()])
        cached = {start.url: num_blocks * BLOCK_TOKENS for start, num_blocks in found.items()}
        ask = Ask(
            turn=next(self._turns),
            draws=(self._chance.random(), self._chance.random()),
            num_prompt_tokens=request.num_tokens,
            session=str(request.block_ids[1 if len(request.block_ids) > 1 else 0]),
        )
        route = choose_route(self._fleet, ask, self._rules, Knowledge(self._queued, cached))
        assert isinstance(route, Pair)
        return route

    def _pass_until(
        self, now_s: float, requests: Sequence[Request], first_at: dict[int, float], outcome: Outcome
    ) -> None:
        while self._events and self._events[0][0] <= now_s:
            at_s, _, what, number = heapq.heappop(self._events)
            if what == "first":
                self._begin_stream(at_s, number, requests[number])
            else:
                self._end_stream(at_s, what, requests, first_at, outcome)

    def _begin_stream(self, at_s: float, number: int, request: Request) -> None:
        pair = self._pairs[number]
        self._queued[pair.prompt.url] -= request.num_tokens
        engine = self._completions[pair.completion.url]
        engine.advance(at_s)
        engine.left[number] = float(request.num_output_tokens - 1)
        self._expect_end(pair.completion.url)

    def _end_stream(
        self, at_s: float, url: str, requests: Sequence[Request], first_at: dict[int, float], outcome: Outcome
    ) -> None:
        engine = self._completions[url]
        upcoming = engine.next_end()
        if upcoming is None or upcoming[0] > at_s + 1e-9:
            return  # another stream came in between, and has put the end off
        engine.advance(at_s)
        number = upcoming[1]
        del engine.left[number]
        self._queued[url] -= requests[number].num_tokens + STREAM_TOKENS
        num_tokens = requests[number].num_output_tokens
        outcome.token_s.append((at_s - first_at[number]) / max(1, num_tokens - 1))
        self._expect_end(url)

    def _expect_end(self, url: str) -> None:
        upcoming = self._completions[url].next_end()
        if upcoming is not None:
            self._at(upcoming[0], url, 0)

    def _at(self, time_s: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (time_s, next(self._ties), what, number))


def _engines(role: EngineRole, number: int) -> list[Engine]:
    info = EngineInfo(
        role=role,
        engine_id=role,
        epoch=1,
        model="simulated",
        compatibility_hash="equal",
        max_model_len=1 << 20,
        max_num_seqs=1 << 10,
        block_size=BLOCK_TOKENS,
        num_usable_blocks=CACHE_TOKENS // BLOCK_TOKENS,
        num_free_blocks=CACHE_TOKENS // BLOCK_TOKENS,
        version="0",
    )
    urls = [f"http://{role}-{place}" for place in range(number)]
    return [Engine(url=url, role=role, info=replace(info, engine_id=url), is_ready=True) for url in urls]


def requests_of(trace: str, num_requests: int, num_prompt: int, load: float, seed: int) -> list[Request]:
    """The trace's first requests, with arrivals and lengths of answers."""
    chance = random.Random(seed)
    prompts = [tuple(map(int, ids)) for ids in read_trace(trace)[:num_requests]]
    mean_tokens = sum(map(len, prompts)) * BLOCK_TOKENS / len(prompts)
    rate = load * num_prompt * PREFILL_TOKENS_PER_S / mean_tokens
    outputs = _output_lengths()
    requests, now_s = [], 0.0
    for block_ids in prompts:
        now_s += chance.expovariate(rate)
        requests.append(Request(now_s, block_ids, max(2, next(outputs))))
    return requests


def _output_lengths() -> Iterator[int]:
    with gzip.open(TRACES / "azure_conv_lengths.csv.gz", "rt") as lines:
        lengths = [int(row[-1]) for row in list(csv.reader(lines))[1:]]
    while True:
        yield from lengths


def add_rows(report: Report, requests: Sequence[Request], num_prompt: int, num_completion: int) -> None:
    """Each policy for one role, with the default for the other; ratios are to round robin."""
    for role in ("prompt", "completion"):
        baseline: Outcome | None = None
        for policy in POLICIES:
            rules = (
                PairingRules(prompt=policy, completion="least_tokens")
                if role == "prompt"
                else PairingRules(completion=policy)
            )
            outcome = Simulation(rules, num_prompt, num_completion, seed=1).run(requests)
            baseline = baseline or outcome
            _add(report, f"{role}: {policy}", role, outcome, baseline)


def _add(report: Report, case: str, role: str, outcome: Outcome, baseline: Outcome) -> None:
    """Of each role what its choice decides."""
    if role == "completion":
        _add_times(report, case, "between tokens", outcome.token_s, baseline.token_s)
        return
    _add_times(report, case, "first token", outcome.first_token_s, baseline.first_token_s)
    report.add(
        case, "prompt tokens found cached", 100 * outcome.cached_share, "%", 100 * baseline.cached_share
    )
    report.add(case, "busiest engine / mean", outcome.imbalance, "x")


def _add_times(report: Report, case: str, what: str, times_s: list[float], baseline_s: list[float]) -> None:
    report.add(case, f"{what}, mean", 1e3 * float(np.mean(times_s)), "ms", 1e3 * float(np.mean(baseline_s)))
    p90, base = float(np.percentile(times_s, 90)), float(np.percentile(baseline_s, 90))
    report.add(case, f"{what}, p90", 1e3 * p90, "ms", 1e3 * base)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--trace", default="mooncake_conversation_blocks")
    parser.add_argument("--prompt-engines", type=int, default=8)
    parser.add_argument("--completion-engines", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.9)
    arguments = parser.parse_args()
    requests = requests_of(
        arguments.trace, arguments.requests, arguments.prompt_engines, arguments.load, seed=1
    )
    report = Report("routing")
    add_rows(report, requests, arguments.prompt_engines, arguments.completion_engines)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
