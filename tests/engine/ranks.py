"""Ranks of a group as threads of this process: real collectives, real engines, a tiny model."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from engine.choices import Choices
from engine.group import EngineGroup
from engine.handover_role import NoHandover
from engine.ipc import AddRequest, RequestOutput
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.sampler import Sampler
from shared_scheduler import Scheduler, SchedulerConfig
from tests.engine.group_members import Rank, join, place
from tests.engine.pair import Answer
from tests.ports import free_port

TIMEOUT_S = 60.0
T = TypeVar("T")


@contextmanager
def connected_ranks(size: int, step_timeout_s: float = 300.0) -> Iterator[list[Rank]]:
    """A group that has formed."""
    port = free_port()
    ranks = in_parallel(size, lambda rank: join(place(rank, size, port, step_timeout_s)))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.group.close()


def in_parallel(size: int, work: Callable[[int], T]) -> list[T]:
    """What `work` returns on each rank; the first exception of any is raised."""
    return [future.result() for future in _run(size, work)]


def errors_of(size: int, work: Callable[[int], object]) -> list[str]:
    return [str(future.exception()) for future in _run(size, work)]


def _run(size: int, work: Callable[[int], T]) -> list[Future[T]]:
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(work, rank) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that reaches its rank before turn number `turn`; its client may leave later."""

    turn: int
    request: AddRequest
    abort_turn: int | None = None

    @property
    def last_turn(self) -> int:
        return max(self.turn, self.abort_turn or 0)


class Finish:
    """Ranks go home together: when every one has served all it had."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks
        self._waiting = set(range(len(ranks)))
        self._lock = threading.Lock()

    @property
    def is_reached(self) -> bool:
        return not self._waiting

    def reach(self, index: int) -> None:
        with self._lock:
            self._waiting.discard(index)
        if self.is_reached:
            self.release()

    def release(self) -> None:
        self._waiting.clear()
        for rank in self._ranks:
            rank.woken.set()


class KindRecorder:
    """The group as its engine sees it; writes down what kind of step the ranks begin."""

    def __init__(self, group: EngineGroup) -> None:
        self._group = group
        self.kinds = ""

    @property
    def is_busy(self) -> bool:
        return self._group.is_busy

    @property
    def is_quiet(self) -> bool:
        return self._group.is_quiet

    @property
    def wait_s(self) -> float:
        return self._group.wait_s

    def allreduce_min(self, value: int) -> int:
        return self._group.allreduce_min(value)

    def takes_step(self, has_work: bool) -> bool:
        return self._group.takes_step(has_work)

    def begin_step(self, step_id: int, prompt_run: bool, *, is_empty: bool, has_work: bool) -> bool:
        self.kinds += "P" if prompt_run else "D"
        return self._group.begin_step(step_id, prompt_run, is_empty=is_empty, has_work=has_work)

    def close(self) -> None:
        self._group.close()


class RankEngine:
    """The engine of one rank and the loop around it."""

    def __init__(
        self, rank: Rank, config: SchedulerConfig, runner: ModelRunner, *, overlap: bool = False
    ) -> None:
        self._woken = rank.woken
        self.recorder = KindRecorder(rank.group)
        self.scheduler = Scheduler(config, group=self.recorder)
        choices = Choices(self.scheduler)
        self.engine = LLMEngine(
            self.scheduler,
            runner,
            Sampler(),
            NoHandover(self.scheduler),
            choices=choices,
            group=self.recorder,
            overlap=overlap,
        )
        self.answers: dict[str, Answer] = {}

    def serve(self, index: int, arrivals: list[Arrival], finish: Finish) -> None:
        """Turn until every rank has served all of its arrivals."""
        last_turn = max((arrival.last_turn for arrival in arrivals), default=0)
        turn = 0
        try:
            while not finish.is_reached:
                self._receive(arrivals, turn)
                for output in self._turn():
                    self.answers.setdefault(output.request_id, Answer()).take(output)
                self.scheduler.check_invariants()
                turn += 1
                if turn > last_turn and not self.engine.has_work:
                    finish.reach(index)
                    self._woken.wait(TIMEOUT_S)
                    self._woken.clear()
        except BaseException:
            finish.release()
            raise

    def _receive(self, arrivals: list[Arrival], turn: int) -> None:
        for arrival in arrivals:
            if arrival.turn == turn:
                self.engine.add(arrival.request)
            if arrival.abort_turn == turn:
                self.engine.abort(arrival.request.request_id)

    def _turn(self) -> list[RequestOutput]:
        outputs = list(self.engine.poll())
        if self.engine.takes_step():
            outputs += self.engine.step()
        return outputs
