"""Ports for the processes of a stack."""

import socket
from contextlib import ExitStack


def free_ports(num_ports: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has. All are held until the last is drawn: none comes twice."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(num_ports)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
