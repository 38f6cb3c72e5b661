"""The node's network namespace, a bridge that pods' namespaces hang on; unseen from outside."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODE_IP = "10.77.0.1"
SERVICE_RANGE = "10.96.0.0/16"
BRIDGE = "tandem0"
CLONE_NEWNET = 0x40000000


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def why_no_namespaces() -> str:
    """Empty where namespaces can be made here."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    name = f"tandem-try-{os.getpid()}"
    try:
        run_ip("netns", "add", name)
        run_ip("netns", "delete", name)
    except (OSError, subprocess.SubprocessError) as error:
        return f"ip cannot make network namespaces: {error}"
    return ""


class NodeNetwork:
    """Owns the node's namespace."""

    def __init__(self) -> None:
        self.name = f"tandem-node-{os.getpid()}"

    def __enter__(self) -> "NodeNetwork":
        run_ip("netns", "add", self.name)
        for command in (
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"addr add {NODE_IP}/16 dev {BRIDGE}",
            f"link set {BRIDGE} up",
            # Addresses of Services are the node's own: a forwarder listens there.
            f"addr add {SERVICE_RANGE.replace('.0/16', '.1/32')} dev lo",
        ):
            run_ip("-n", self.name, *command.split())
        return self

    def __exit__(self, *exception: object) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, timeout=20)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and whatever it starts, is in the node's namespace."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.name}") as node:
            _set_namespace(node.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())


class PodNetwork:
    """Owns a pod's namespace and its address; called in the node's namespace."""

    def __init__(self, number: int) -> None:
        self.ip = f"10.77.{1 + (number >> 8)}.{number & 255}"
        self.name = f"tandem-pod-{os.getpid()}-{number}"
        self._outside = f"tp{number}"

    def up(self) -> None:
        run_ip("netns", "add", self.name)
        # One hardware address for each IP: whoever knows an IP's last owner reaches the next one.
        address = "02:00:" + ":".join(f"{int(part):02x}" for part in self.ip.split("."))
        peer = ["peer", "name", "eth0", "address", address, "netns", self.name]
        run_ip("link", "add", self._outside, "type", "veth", *peer)
        run_ip("link", "set", self._outside, "master", BRIDGE, "up")
        for command in (
            f"addr add {self.ip}/16 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {NODE_IP}",
        ):
            run_ip("-n", self.name, *command.split())

    def down(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, timeout=20)


def remove_namespaces(prefix: str) -> None:
    """Those that a process that was killed has left."""
    for path in Path("/run/netns").glob(f"{prefix}*"):
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, timeout=20)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
