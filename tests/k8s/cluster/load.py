"""Clients that keep streaming while something happens, and what became of every stream."""

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

logger = logging.getLogger(__name__)

MODEL = "smollm2-135m-instruct"
READ_TIMEOUT_S = 120.0


class StreamFailed(Exception):
    """A stream that did not end as one should, after so much text."""

    def __init__(self, message: str, num_characters: int = 0) -> None:
        super().__init__(message)
        self.num_characters = num_characters


class NeverAnswered(StreamFailed):
    """The server closed the connection before it answered a byte."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy completion that goes on to its last token."""

    prompt: str
    num_tokens: int


def stream_text(client: httpx.Client, url: str, ask: Ask) -> str:
    """The whole text; `StreamFailed` for anything but a clean end."""
    body = {
        "model": MODEL,
        "prompt": ask.prompt,
        "max_tokens": ask.num_tokens,
        "min_tokens": ask.num_tokens,
        "temperature": 0,
        "stream": True,
    }
    text, finish_reason, is_done = "", None, False
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise StreamFailed(f"HTTP {answer.status_code}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise StreamFailed(str(event["error"]), len(text))
                    for choice in event["choices"]:
                        text += choice["text"]
                        finish_reason = choice["finish_reason"] or finish_reason
    except httpx.HTTPError as error:
        kind = NeverAnswered if "without sending a response" in str(error) else StreamFailed
        raise kind(repr(error), len(text)) from None
    if not is_done or finish_reason != "length":
        raise StreamFailed(f"ended with {finish_reason}, done: {is_done}", len(text))
    return text


@dataclass
class Load:
    """What has become of the streams so far; `expected` are the texts of undisturbed ones."""

    url: str
    asks: Sequence[Ask]
    expected: dict[Ask, str]
    repeats_unanswered: bool = False
    """A request on a kept connection that the server closed before it answered a byte is sent once more, as
    OpenAI's clients do: it may have crossed with the connection's end. Once a client: one proxy goes."""
    num_ok: int = 0
    num_cut: int = 0
    """Streams that failed when they had text."""
    failures: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answered: set[Ask] = field(default_factory=set)
    _may_repeat: set[Ask] = field(default_factory=set)

    def work(self, ask: Ask) -> None:
        with httpx.Client(timeout=READ_TIMEOUT_S, trust_env=False) as client:
            while not self._stopping.is_set():
                self._one(client, ask)

    def _one(self, client: httpx.Client, ask: Ask) -> None:
        try:
            text = stream_text(client, self.url, ask)
        except StreamFailed as failure:
            may_repeat = ask in self._may_repeat
            self._may_repeat.discard(ask)
            if not (may_repeat and isinstance(failure, NeverAnswered)):
                self._failed(failure)
            return
        if self.repeats_unanswered and ask not in self._answered:
            self._answered.add(ask)
            self._may_repeat.add(ask)
        self._ended(ask, text)

    def _failed(self, failure: StreamFailed) -> None:
        with self._lock:
            self.failures.append(
                f"{time.strftime('%H:%M:%S')} {failure!r} after {failure.num_characters} characters"
            )
            self.num_cut += failure.num_characters > 0
        self._stopping.wait(0.2)

    def _ended(self, ask: Ask, text: str) -> None:
        with self._lock:
            if text == self.expected.get(ask, text):
                self.num_ok += 1
            else:
                self.changed.append(f"{self.expected[ask]!r} became {text!r}")

    def stop(self) -> None:
        """Streams that are open end first."""
        self._stopping.set()

    def assert_unharmed(self) -> None:
        assert self.failures == []
        assert self.changed == []
        assert self.num_ok > 0


@contextmanager
def running_load(
    url: str, asks: Sequence[Ask], expected: dict[Ask, str] | None = None, *, repeats_unanswered: bool = False
) -> Iterator[Load]:
    """One client for each ask, again and again; all have ended when the context has."""
    load = Load(url, asks, expected or {}, repeats_unanswered)
    threads = [threading.Thread(target=load.work, args=(ask,), daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join(READ_TIMEOUT_S)
        logger.info(
            "%d streams as expected, failed: %s, changed: %s", load.num_ok, load.failures, load.changed
        )


def undisturbed(url: str, asks: Sequence[Ask]) -> dict[Ask, str]:
    """Each one's answer, all asked at once."""
    with (
        httpx.Client(timeout=READ_TIMEOUT_S, trust_env=False) as client,
        ThreadPoolExecutor(len(asks)) as threads,
    ):
        return dict(zip(asks, threads.map(lambda ask: stream_text(client, url, ask), asks), strict=True))
