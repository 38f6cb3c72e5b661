"""Many long streams at once, and something that happens to the engines below them."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tests.system.processes import RunningStack, ServiceProcess, eventually

MODEL = "smollm2-135m-instruct"
STREAM_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One stream; odd ones are sampled with a seed of their own.

    Sums in other batches round differently, and each token that may be drawn adds a place where the last bit
    of a probability can decide: so they are drawn from ten.
    """

    number: int
    num_tokens: int
    num_read: int | None = None
    """The client leaves when it has so many characters, and what was to happen has happened."""
    num_words: int = 0
    """Of the prompt, beside its first sentence."""

    def fields(self) -> dict[str, object]:
        return {
            "model": MODEL,
            "prompt": f"Story number {self.number}. Once upon a time" + " and then" * self.num_words,
            "max_tokens": self.num_tokens,
            "temperature": float(self.number % 2),
            "seed": self.number,
            "stream": True,
            "extra_body": {"ignore_eos": True, "top_k": 10},
        }


class Streams:
    """Asks that run at once."""

    def __init__(self, stack: RunningStack, asks: list[Ask]) -> None:
        self._stack = stack
        self._asks = asks
        self._num_chunks = [0] * len(asks)
        self._has_happened = threading.Event()

    def run(
        self,
        during: Callable[[], None] = lambda: None,
        *,
        after_chunks: int = 8,
        num_begun: int | None = None,
    ) -> list[str]:
        """All texts; `during` is called when so many streams (all) have sent so many chunks, or ended."""
        needed = len(self._asks) if num_begun is None else num_begun
        with ThreadPoolExecutor(len(self._asks)) as pool:
            running = self._send(pool)
            eventually(
                lambda: self._num_begun(running, after_chunks) >= needed,
                f"{needed} streams have begun",
                STREAM_TIMEOUT_S,
            )
            try:
                during()
            finally:
                self._has_happened.set()
            return [task.result(STREAM_TIMEOUT_S) for task in running]

    def _send(self, pool: ThreadPoolExecutor) -> list[Future[str]]:
        """Endless streams first, each once the one before has begun: so the proxy spreads them evenly."""
        running: dict[int, Future[str]] = {}
        for is_endless in (True, False):
            for place, ask in enumerate(self._asks):
                if (ask.num_read is not None) == is_endless:
                    running[place] = pool.submit(self._stream, place)
                    if is_endless:
                        self._wait_for_first_chunk(place, running[place])
        return [running[place] for place in range(len(self._asks))]

    def _wait_for_first_chunk(self, place: int, task: Future[str]) -> None:
        eventually(
            lambda: self._num_chunks[place] > 0 or task.done(), f"stream {place} has begun", STREAM_TIMEOUT_S
        )

    def _num_begun(self, running: list[Future[str]], after_chunks: int) -> int:
        pairs = zip(self._num_chunks, running, strict=True)
        return sum(num_chunks >= after_chunks or task.done() for num_chunks, task in pairs)

    def _stream(self, place: int) -> str:
        text, num_read = "", self._asks[place].num_read
        with self._stack.client() as client:
            for chunk in client.completions.create(**self._asks[place].fields()):  # type: ignore[call-overload]
                text += chunk.choices[0].text
                self._num_chunks[place] += 1
                if num_read is not None and len(text) >= num_read and self._has_happened.is_set():
                    break
        return text[:num_read]


def kill_engine(service: ServiceProcess) -> None:
    """The engine process dies; its service starts another."""
    os.kill(service.engine_process().pid, signal.SIGKILL)


def stop_engine(service: ServiceProcess) -> None:
    """The engine process falls silent; its service kills it after a while."""
    os.kill(service.engine_process().pid, signal.SIGSTOP)


def kill_service(service: ServiceProcess) -> None:
    """The service dies, and its engine with it."""
    service.process.kill()


def stop_service(service: ServiceProcess) -> None:
    """The service answers nothing any more, its engine neither."""
    os.kill(service.engine_process().pid, signal.SIGSTOP)
    service.process.send_signal(signal.SIGSTOP)


def drain_service(service: ServiceProcess) -> None:
    """The service ends politely, with less grace than its streams need."""
    service.process.send_signal(signal.SIGTERM)


FAULTS: dict[str, Callable[[ServiceProcess], None]] = {
    "kill -9 of the engine": kill_engine,
    "kill -9 of the service": kill_service,
    "SIGSTOP of the engine": stop_engine,
    "SIGSTOP of the service": stop_service,
    "SIGTERM of the service": drain_service,
}


def bring_back(stack: RunningStack, name: str, fault: str) -> None:
    """Let whatever was done to a service be over, and the proxy know it."""
    if fault.endswith("service"):
        stack.services[name].process.kill()
        stack.restart(name)
    eventually(stack.services[name].is_ready, f"{name} is ready again", 120)
    proxy, num_engines = stack.services["proxy"], len(stack.services) - 1
    eventually(
        lambda: proxy.metric("tandem_proxy_ready_engines") == num_engines, "the proxy has all engines", 120
    )
