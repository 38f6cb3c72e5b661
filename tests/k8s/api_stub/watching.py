"""A watch: events as lines of a stream without end, and the faults that happen to it."""

import json
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from tests.k8s.api_stub.resources import Resource
from tests.k8s.api_stub.selectors import Manifest
from tests.k8s.api_stub.store import ApiError

if TYPE_CHECKING:
    from tests.k8s.api_stub.server import ApiStub

EXPIRED = ApiError(410, "Expired", "too old resource version")


class Watch:
    def __init__(
        self,
        stub: "ApiStub",
        resource: Resource,
        namespace: str,
        selectors: tuple[str, str],
        is_stopping: Callable[[], bool],
        wants_bookmarks: bool,
        begins_with_list: bool,
    ) -> None:
        self._stub = stub
        self._store = stub.store
        self._resource = resource
        self._namespace = namespace
        self._selectors = selectors
        self._is_stopping = is_stopping
        self._wants_bookmarks = wants_bookmarks
        self._begins_with_list = begins_with_list
        self._num_cuts, _ = stub.faults.cut(resource.plural)

    def run(self, stream: IO[bytes], version: int, end_s: float) -> bool:
        """Write events after `version` until the time is over or something breaks.

        With 0, or where the client wants a list in the stream, it begins with what there is. True where the
        stream has ended as it should, so that its connection is good for another request.
        """
        self._stream = stream
        self._count(+1)
        try:
            if version == 0 or self._begins_with_list:
                version = self._send_list()
            has_ended = self._follow(version, end_s)
            if has_ended:
                stream.write(b"0\r\n\r\n")
                stream.flush()
            return has_ended
        except OSError:
            return False  # the client has left
        finally:
            self._count(-1)

    def _send_list(self) -> int:
        """The version of what was sent; a client that asked for a list is told where it ends."""
        items, version = self._store.find(self._resource, self._namespace, *self._selectors)
        for manifest in items:
            self._send("ADDED", manifest)
        if self._begins_with_list:
            self._say_where(version, {"annotations": {"k8s.io/initial-events-end": "true"}})
        return version

    def _follow(self, version: int, end_s: float) -> bool:
        """Whether the stream ends as it should."""
        plural, faults = self._resource.plural, self._stub.faults
        while True:
            if self._is_stopping():
                return False
            number, how = faults.cut(plural)
            if number != self._num_cuts:
                if how == "in_event":
                    self._write_chunk(b'{"type":"MODIFIED","object":{"kind":"')
                return how == "cleanly"
            if version < self._store.first_known_version:
                self._send("ERROR", EXPIRED.status())
                return True
            if time.monotonic() >= end_s:
                self._say_where(version)
                return True
            version = self._wait_and_send(version, end_s)

    def _wait_and_send(self, version: int, end_s: float) -> int:
        plural, store = self._resource.plural, self._store
        with store.changed:
            is_silent = self._stub.faults.is_silent(plural)
            events = [] if is_silent else store.events_after(version)
            if not events:
                # The client may have left: only writing tells, so nothing is waited for too long.
                store.changed.wait(min(0.5, max(0.0, end_s - time.monotonic())))
                return version
        for event in events:
            place = event.manifest["metadata"].get("namespace", "")
            if event.resource == self._resource and self._namespace in ("", place):
                seen = event.for_watch(*self._selectors)
                if seen is not None:
                    self._send(*seen)
            version = event.version
        return version

    def _say_where(self, version: int, more: Manifest | None = None) -> None:
        if self._wants_bookmarks:
            metadata = {"resourceVersion": str(version), **(more or {})}
            kind = {"kind": self._resource.kind, "apiVersion": self._resource.api_version}
            self._send("BOOKMARK", {**kind, "metadata": metadata})

    def _send(self, type: str, manifest: Manifest) -> None:
        self._write_chunk(json.dumps({"type": type, "object": manifest}).encode() + b"\n")

    def _write_chunk(self, content: bytes) -> None:
        self._stream.write(b"%x\r\n%s\r\n" % (len(content), content))
        self._stream.flush()

    def _count(self, change: int) -> None:
        with self._store.changed:
            plural = self._resource.plural
            self._stub.num_watches[plural] = self._stub.num_watches.get(plural, 0) + change
            self._store.changed.notify_all()
