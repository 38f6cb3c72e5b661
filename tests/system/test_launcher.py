"""`tandem serve` as a newcomer meets it."""

import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.system.processes import child_pids, eventually, is_alive

pytestmark = pytest.mark.system

COMMAND = [sys.executable, "-m", "launcher.main", "serve"]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def curl_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("curl"):
            return line
    raise AssertionError(f"no curl line; {process.stderr.read() if process.stderr else ''}")


def run_curl(line: str) -> str:
    return subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True).stdout


def test_serve_prints_a_curl_line_that_streams_a_sensible_answer_and_ctrl_c_stops_everything() -> None:
    with running("--port", str(free_port())) as process:
        answer = run_curl(curl_line(process))
        assert "Paris" in "".join(re.findall(r'"content":\s*"([^"]*)"', answer))
        assert answer.rstrip().endswith("data: [DONE]")
        children = child_pids(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert not any(is_alive(pid) for pid in children)


@pytest.mark.parametrize("victim", ["prompt_service", "proxy"])
def test_a_process_that_dies_takes_the_others_with_it_and_is_named(victim: str) -> None:
    with running("--port", str(free_port())) as process:
        curl_line(process)
        children = child_pids(process.pid)
        (pid,) = (p for p in children if victim in psutil.Process(p).cmdline())
        psutil.Process(pid).kill()
        assert process.wait(timeout=30) == 1
        assert process.stderr is not None
        assert f"{victim.removesuffix('_service')} ended with code -9" in process.stderr.read()
        assert not any(is_alive(pid) for pid in children)


def test_a_killed_launcher_leaves_no_process_behind() -> None:
    with running("--port", str(free_port())) as process:
        curl_line(process)
        children = child_pids(process.pid)
        process.kill()
        eventually(lambda: not any(is_alive(pid) for pid in children), "all children have ended")


def refusal(*arguments: str) -> str:
    """What `tandem serve` says before it ends with an error."""
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    return result.stderr


def test_unknown_model_is_one_line_that_says_what_to_give() -> None:
    message = refusal("--model", "no-such-model")
    assert message.count("\n") == 1
    assert "no-such-model" in message
    assert "--model" in message


def test_port_in_use_names_the_port_and_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        message = refusal("--port", port)
    assert port in message
    assert "--port" in message


def test_truncated_gguf_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    message = refusal("--model", str(broken))
    assert str(broken) in message


def test_unknown_option_and_bad_value_are_refused_by_name() -> None:
    assert "--no-such-option" in refusal("--no-such-option", "1")
    assert "--port" in refusal("--port", "99999999")


def test_help_names_every_option() -> None:
    result = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60, check=True)
    for option in ("--model", "--transport", "--dtype", "--engine", "--port", "--kv-bytes"):
        assert option in result.stdout
