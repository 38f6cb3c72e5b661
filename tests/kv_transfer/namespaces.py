"""Two hosts on this machine: network namespaces joined by a link that can be slow, and cut."""

import os
import shutil
import subprocess
from types import TracebackType

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _works() -> bool:
    if any(shutil.which(tool) is None for tool in ("ip", "tc")):
        return False
    name = f"tandem-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _works(), reason="ip and tc (package iproute2) and the right to make network namespaces are needed"
)


class TwoHosts:
    """`hosts[0]` and `hosts[1]` as beginnings of commands; a context manager that leaves nothing behind."""

    def __init__(self, rate: str = "100mbit") -> None:
        self._names = [f"tandem-{os.getpid()}-{side}" for side in "ab"]
        self._links = ["left", "right"]
        self._rate = rate
        self.hosts = [("ip", "netns", "exec", name) for name in self._names]

    def __enter__(self) -> "TwoHosts":
        for name in self._names:
            run("ip", "netns", "add", name)
        (left, right), (one, other) = self._links, self._names
        run("ip", "link", "add", left, "netns", one, "type", "veth", "peer", "name", right, "netns", other)
        bucket = ("rate", self._rate, "burst", "64kb", "latency", "100ms")
        for name, link, address in zip(self._names, self._links, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *bucket)
        return self

    def cut(self) -> None:
        run("ip", "-n", self._names[0], "link", "set", self._links[0], "down")

    def join(self) -> None:
        run("ip", "-n", self._names[0], "link", "set", self._links[0], "up")

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._names:
            run("ip", "netns", "del", name)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
