"""Ports that a test gives away before they are bound, and that nobody else takes meanwhile.

They lie below the range from which the kernel serves port 0 and outgoing connections (32768 and up). Every
process of tests has a block of them to itself for as long as it lives: it is the one that has bound the
block's first port.
"""

import itertools
import os
import socket
from functools import cache

FIRST_PORT = 12_000
BLOCK_SIZE = 250
NUM_BLOCKS = 72


class PortBlock:
    """The ports of one process of tests, handed out in turn."""

    def __init__(self, number: int) -> None:
        """`OSError` where another process has this block."""
        first = FIRST_PORT + number * BLOCK_SIZE
        self._lock = _bound(first)
        self._ports = itertools.cycle(range(first + 1, first + BLOCK_SIZE))

    def draw(self) -> int:
        """A port that nobody has now; the same one comes again when the whole block has been drawn."""
        for port in itertools.islice(self._ports, BLOCK_SIZE):
            try:
                _bound(port).close()
            except OSError:
                continue  # a process that a test has started still has it
            return port
        raise AssertionError("every port of this block is bound")


def free_port() -> int:
    return _own_block().draw()


def free_ports(num_ports: int) -> list[int]:
    return [free_port() for _ in range(num_ports)]


@cache
def _own_block() -> PortBlock:
    for number in range(NUM_BLOCKS):
        try:
            return PortBlock((os.getpid() + number) % NUM_BLOCKS)
        except OSError:
            continue
    raise AssertionError(f"all {NUM_BLOCKS} blocks of ports have owners")


def _bound(port: int) -> socket.socket:
    probe = socket.socket()
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        probe.close()
        raise
    return probe
