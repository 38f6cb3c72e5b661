"""What the web page shows of the last minutes: latencies in buckets of time, prompts and where they are.

Nothing in here has text of a prompt or an answer.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxy.pairing import HasEngines, Pair

BUCKET_S = 5.0
NUM_BUCKETS = 60
MAX_SAMPLES = 2000
"""Kept of one bucket, the first ones; a busy proxy has more than enough of them."""
NUM_TRACES = 256
"""Ended prompts that can still be asked for."""

TraceState = Literal["prompt", "hand-over", "completion", "ended"]


@dataclass(slots=True)
class Trace:
    """One prompt and the engines that have it now, or had it last. Times are of the clock of `Activity`."""

    request_id: str
    engine_urls: tuple[str, ...]
    is_pair: bool
    started_s: float
    first_token_s: float | None = None
    arrived_s: float | None = None
    """When the first token of the completion engine came: it had the KV blocks then."""
    ended_s: float | None = None
    num_migrations: int = 0

    @property
    def is_to_arrive(self) -> bool:
        """The completion engine has yet to answer."""
        return self.is_pair and self.arrived_s is None

    def token(self, now_s: float, *, is_first_of_choice: bool) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        elif self.is_to_arrive and not is_first_of_choice:
            self.arrived_s = now_s

    def moved(self, route: HasEngines) -> None:
        """It, or one of its choices, goes on there."""
        self.engine_urls = tuple(engine.url for engine in route.engines)
        self.is_pair = isinstance(route, Pair)

    @property
    def state(self) -> TraceState:
        if self.ended_s is not None:
            return "ended"
        if self.first_token_s is None:
            return "prompt"
        return "hand-over" if self.is_to_arrive else "completion"


@dataclass(slots=True)
class Bucket:
    """What happened in a few seconds."""

    number: int
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


class Activity:
    """Written by requests as they go, read by the page."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, bucket_s: float = BUCKET_S) -> None:
        self.bucket_s = bucket_s
        self._clock = clock
        self._buckets: deque[Bucket] = deque(maxlen=NUM_BUCKETS)
        self._open: dict[int, Trace] = {}
        self._ended: OrderedDict[str, Trace] = OrderedDict()

    def trace(self, request_id: str, route: HasEngines, started_s: float) -> Trace:
        urls = tuple([engine.url for engine in route.engines])
        return Trace(request_id, urls, isinstance(route, Pair), started_s)

    def begin(self, trace: Trace) -> None:
        """The prompt is with the engines from now on, until `end`."""
        self._open[id(trace)] = trace

    def end(self, trace: Trace) -> None:
        del self._open[id(trace)]
        trace.ended_s = self._clock()
        self._ended[trace.request_id] = trace
        if len(self._ended) > NUM_TRACES:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Trace | None:
        open_trace = next((t for t in self._open.values() if t.request_id == request_id), None)
        return open_trace or self._ended.get(request_id)

    def open_traces(self) -> Sequence[Trace]:
        return tuple(self._open.values())

    def first_token(self, waited_s: float, now_s: float) -> None:
        samples = self._counted(now_s).first_token_s
        if len(samples) < MAX_SAMPLES:
            samples.append(waited_s)

    def next_token(self, waited_s: float, now_s: float) -> None:
        samples = self._counted(now_s).inter_token_s
        if len(samples) < MAX_SAMPLES:
            samples.append(waited_s)

    def next_tokens(self, waited_s: Sequence[float], now_s: float) -> None:
        """Of several choices, each waited for that long."""
        samples = self._counted(now_s, len(waited_s)).inter_token_s
        samples += waited_s[: MAX_SAMPLES - len(samples)]

    def buckets(self) -> list[Bucket]:
        """Of the last minutes, the oldest first; those without anything are empty, the current one is out."""
        current = int(self._clock() / self.bucket_s)
        known = {bucket.number: bucket for bucket in self._buckets}
        numbers = range(current - NUM_BUCKETS + 1, current)
        return [known.get(number) or Bucket(number) for number in numbers]

    def _counted(self, now_s: float, num_tokens: int = 1) -> Bucket:
        """The bucket of this moment, with so many tokens more."""
        number = int(now_s / self.bucket_s)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(Bucket(number))
        bucket = self._buckets[-1]
        bucket.num_tokens += num_tokens
        return bucket

    def check_invariants(self) -> None:
        """Nothing is with the engines and ended."""
        assert all(trace.ended_s is None for trace in self._open.values())
        assert len(self._ended) <= NUM_TRACES


def quantile(samples: Sequence[float], share: float) -> float | None:
    """The sample that `share` of all are not above; None without any."""
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
