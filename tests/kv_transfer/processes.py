"""Handles on `peer` processes, and which transports can cross to one."""

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kv_transfer.layout import Region
from kv_transfer.transport import RemoteMemory
from tests.kv_transfer.builders import BLOCK_BYTES, NUM_BLOCKS

TIMEOUT_S = 30.0

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl_cu13") is None,
    reason="NIXL is not installed: pip install 'tandem-serve[nixl]'",
)

FENCED_TRANSPORTS = ["zmq", pytest.param("nixl", marks=needs_nixl)]
"""NIXL over TCP is not among them: its source may abort when a reader cuts a read (decision 020)."""

REAL_TRANSPORTS = ["zmq", pytest.param("nixl", marks=needs_nixl), pytest.param("nixl-tcp", marks=needs_nixl)]


class Peer:
    """A process in one of `peer`'s modes; a context manager that leaves nothing behind."""

    def __init__(
        self,
        mode: str,
        transport: str,
        *,
        address: str = "tcp://127.0.0.1:0",
        epoch: int = 1,
        lease_s: float = 10.0,
        num_blocks: int = NUM_BLOCKS,
        block_bytes: int = BLOCK_BYTES,
        verify_kv: bool = False,
        is_quick: bool = False,
        within: Sequence[str] = (),
    ) -> None:
        """`within`: the beginning of a command that runs the rest of it elsewhere."""
        setup = {
            "mode": mode,
            "transport": transport,
            "address": address,
            "epoch": epoch,
            "lease_s": lease_s,
            "num_blocks": num_blocks,
            "block_bytes": block_bytes,
            "verify_kv": verify_kv,
            "is_quick": is_quick,
        }
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", "tests.kv_transfer.peer", json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._unread = b""
        self.ready: list[Any] = self.expect("ready")

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory(self) -> RemoteMemory:
        blob, regions, address = self.ready
        return RemoteMemory(bytes.fromhex(blob), tuple(Region(*fields) for fields in regions), address)

    def tell(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def expect(self, name: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """The rest of the next line, which must begin with `name`."""
        line = self.next_line(timeout_s)
        assert line is not None, f"no {name} from the peer"
        assert line[0] == name, f"expected {name}, got {line}"
        return line[1:]

    def next_line(self, timeout_s: float = TIMEOUT_S) -> list[Any] | None:
        """None if the process has ended or says nothing."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def catch_up(self) -> None:
        """Returns once everything told so far is carried out; what the peer said meanwhile is dropped."""
        self.tell("echo")
        while (line := self.next_line()) != ["echo"]:
            assert line is not None, "the peer has ended"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)
