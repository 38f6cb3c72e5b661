"""Which lanes UCX chose, from the lines it logs about endpoints: NIXL does not tell.

UCX reads its log settings once, when it is loaded, so there is one log for each process. It is a file that is
unlinked as soon as UCX has opened it.
"""

import ctypes
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

RDMA_LANE = re.compile(r"^(rc|dc|ud|gga|srd)(_|/)")

_LINE = re.compile(r"UCX\s+INFO\s+(?P<agent>\w+) (?P<kind>[\w-]+) cfg#\d+ (?P<lanes>.*)$")
_LANE = re.compile(r"\b\w+/[\w:.-]+")

_SETTINGS = ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_LOG_FILE_FILTER")

AGENT_NAME_LENGTH = 31
"""UCX cuts the names of its workers."""

MAX_AGENTS = 1024


def parse(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Agent (cut) and lanes of every line about an endpoint to another process, such as `cma/memory`."""
    found = []
    for line in text.splitlines():
        match = _LINE.search(line)
        if match is not None and match["kind"] != "self":
            lanes = dict.fromkeys(_LANE.findall(match["lanes"]))
            found.append((match["agent"], tuple(lanes)))
    return found


def is_rdma(lanes: tuple[str, ...]) -> bool:
    return any(RDMA_LANE.match(lane) for lane in lanes)


class LaneLog:
    """One for each process; UCX must be loaded for the first time inside `loading`."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._is_loaded = False
        self._lanes: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Ask UCX for the lines, unless the user has asked for other ones."""
        if self._is_loaded or any(name in os.environ for name in _SETTINGS):
            yield
            return
        self._is_loaded = True
        self._fd, path = tempfile.mkstemp(prefix="tandem-ucx-")
        os.environ.update(zip(_SETTINGS, ("info", path, "*ucp_worker.c"), strict=True))
        try:
            yield
        finally:
            os.unlink(path)
            for name in _SETTINGS:  # not for child processes
                del os.environ[name]

    def lanes(self, agent: str) -> tuple[str, ...]:
        """Of this agent's last endpoint; nothing where UCX did not say."""
        if self._fd is not None:
            ctypes.CDLL(None).fflush(None)  # UCX writes through a buffered stream of the C library
            text = b"".join(iter(lambda: os.read(self._fd or 0, 1 << 16), b"")).decode(errors="replace")
            self._lanes.update(parse(text))
            while len(self._lanes) > MAX_AGENTS:
                self._lanes.popitem(last=False)
        return self._lanes.get(agent[:AGENT_NAME_LENGTH], ())
