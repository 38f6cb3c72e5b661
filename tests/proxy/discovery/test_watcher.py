"""The watching thread over a scripted source: what it reports, when it asks again, how it ends."""

import queue
import threading
from collections.abc import Iterator

import pytest

from proxy.discovery.endpoints import Endpoint
from proxy.discovery.errors import ClusterRefused, ListingExpired
from proxy.discovery.slices import Changed, Deleted, EndpointSlice, Listed, SliceEndpoint
from proxy.discovery.watcher import MAX_PAUSE_S, Reports, SliceWatcher, pause_s

Answer = Listed | Exception | list[Changed | Deleted | ClusterRefused]


def piece(name: str, *numbers: int) -> EndpointSlice:
    pods = (SliceEndpoint(f"10.0.0.{number}", 7001, f"pod-{number}", True) for number in numbers)
    return EndpointSlice(name, tuple(pods))


class Script:
    """Answers in order; a list is a watch. The watch after the last answer lasts until `close`."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self._closed = threading.Event()
        self.watched_from: list[str] = []

    def list(self) -> Listed:
        answer = self._next()
        assert not isinstance(answer, list)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def watch(self, resource_version: str, timeout_s: float) -> Iterator[Changed | Deleted]:
        self.watched_from.append(resource_version)
        if not self._answers:
            self._closed.wait(10)
            return
        answer = self._next()
        assert isinstance(answer, list)
        for event in answer:
            if isinstance(event, ClusterRefused):
                raise event
            yield event

    def close(self) -> None:
        self._closed.set()

    def _next(self) -> Answer:
        return self._answers.pop(0)


class Watched:
    """A watcher of prompt engines and what it has reported."""

    def __init__(self, *answers: Answer) -> None:
        self.source = Script(*answers)
        self.found: queue.Queue[tuple[Endpoint, ...]] = queue.Queue()
        self.failures: list[str] = []
        reports = Reports(self.found.put, lambda error: self.failures.append(error.reason))
        self.watcher = SliceWatcher("prompt", self.source, reports, relist_s=30)

    def __enter__(self) -> "Watched":
        self.watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.watcher.stop()
        self.watcher.join()
        self.watcher._thread.join(10)
        assert not self.watcher._thread.is_alive()

    def pods(self) -> list[str]:
        """Of the next report."""
        return [endpoint.instance for endpoint in self.found.get(timeout=5)]


def test_a_listing_and_the_changes_after_it_are_reported() -> None:
    with Watched(
        Listed((piece("a", 1),), "7"), [Changed(piece("b", 2)), Deleted("a")], Listed(())
    ) as watched:
        assert [watched.pods() for _ in range(4)] == [["pod-1"], ["pod-1", "pod-2"], ["pod-2"], []]
        assert watched.source.watched_from[0] == "7"


def test_what_a_cut_watch_has_missed_is_listed_anew() -> None:
    cut = ClusterRefused("cut", "the watch broke off")
    with Watched(
        Listed((piece("a", 1), piece("b", 2)), "7"), [cut], Listed((piece("b", 2),), "9")
    ) as watched:
        assert [watched.pods() for _ in range(2)] == [["pod-1", "pod-2"], ["pod-2"]]
    assert watched.source.watched_from == ["7", "9"]
    assert watched.failures == ["cut"]


def test_a_version_that_is_too_old_is_never_asked_for_again() -> None:
    with Watched(
        Listed((piece("a", 1),), "7"), [ListingExpired()], Listed((piece("a", 3),), "90")
    ) as watched:
        assert [watched.pods() for _ in range(2)] == [["pod-1"], ["pod-3"]]
    assert watched.source.watched_from == ["7", "90"]


def test_what_was_found_stays_while_nothing_can_be_asked() -> None:
    refusals = [ClusterRefused("http_504", "HTTP 504"), ClusterRefused("forbidden", "HTTP 403")]
    first, later = Listed((piece("a", 1),), "7"), Listed((piece("a", 2),), "8")
    with Watched(first, [], *refusals, later) as watched:
        assert [watched.pods() for _ in range(2)] == [["pod-1"], ["pod-2"]]
    assert watched.failures == ["http_504", "forbidden"]


def test_whatever_the_client_raises_does_not_end_the_watching() -> None:
    mistake = RuntimeError("Token file exists but empty.")
    first, later = Listed((piece("a", 1),), "7"), Listed((piece("a", 2),), "8")
    with Watched(first, [], mistake, later) as watched:
        assert [watched.pods() for _ in range(2)] == [["pod-1"], ["pod-2"]]
    assert watched.failures == ["unexpected"]


def test_nothing_is_reported_that_has_not_changed() -> None:
    same = Listed((piece("a", 1),), "7")
    with Watched(same, [Changed(piece("a", 1))], same, [], Listed((piece("a", 2),))) as watched:
        assert [watched.pods() for _ in range(2)] == [["pod-1"], ["pod-2"]]


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_pauses_grow_to_their_limit(chance: float) -> None:
    pauses = [pause_s(num_failures, chance) for num_failures in range(20)]
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert MAX_PAUSE_S / 2 <= pauses[-1] <= MAX_PAUSE_S
    assert pause_s(1, chance) <= 0.2
