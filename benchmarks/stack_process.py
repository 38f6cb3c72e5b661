"""A `tandem serve` of its own for a benchmark."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tandem_serve(*arguments: str) -> Iterator[str]:
    """Run `tandem serve` with these arguments; yields the proxy's URL once it is ready."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.main", "serve", "--port", str(port), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("curl"):
                break
        else:
            raise RuntimeError("tandem serve ended before it was ready; its own messages above say why")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
