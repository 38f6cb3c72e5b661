"""The processes as the chart describes them, started here: every variable is taken, `helm test` passes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from processes.child import environment_for_child
from tests.k8s.chart import CHART, Manifest, container, find, render, variables
from tests.k8s.tools import Tools
from tests.ports import free_port
from tests.system.processes import eventually

pytestmark = pytest.mark.system

ROLES = ("prompt", "completion", "proxy")


@pytest.fixture(scope="module")
def manifests(tools: Tools) -> list[Manifest]:
    values = {"proxy.discovery": "static"}
    return render(tools, values=values, files=[CHART / "values-cpu-demo.yaml"])


@contextmanager
def running(deployment: Manifest, pod: dict[str, str], log_path: Path) -> Iterator[str]:
    """One container as a local process; yields its URL once its readiness probe passes."""
    spec = container(deployment)
    here = {"$(POD_IP)": "127.0.0.1", "0.0.0.0": "127.0.0.1"}
    variables_of_pod = {name: here.get(value, value) for name, value in variables(deployment).items()} | pod
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *spec["command"][1:]],
            env={**environment_for_child(), **variables_of_pod},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    port = next(value for name, value in variables_of_pod.items() if re.fullmatch(r"TANDEM_\w+?_PORT", name))
    url = f"http://127.0.0.1:{port}"
    path = spec["readinessProbe"]["httpGet"]["path"]

    def is_ready() -> bool:
        assert process.poll() is None, log_path.read_text()[-3000:]
        try:
            return httpx.get(url + path, timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(is_ready, f"{url}{path}", 120.0)
        yield url
    finally:
        process.terminate()
        assert process.wait(timeout=20) == 0


@pytest.fixture(scope="module")
def proxy_url(manifests: list[Manifest], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The release's three processes on free ports of this machine."""
    logs = tmp_path_factory.mktemp("logs")
    pod: dict[str, str] = {}
    with ExitStack() as stack:
        for role in ROLES:
            deployment = find(manifests, "Deployment", f"rel-tandem-{role}")
            own = {f"TANDEM_{role.upper()}_PORT": str(free_port())} | (pod if role == "proxy" else {})
            url = stack.enter_context(running(deployment, own, logs / f"{role}.log"))
            pod[f"TANDEM_PROXY_{role.upper()}_URL"] = url
        yield url


def ask(manifests: list[Manifest], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run what the test pod runs."""
    command = container(find(manifests, "Pod", "rel-tandem-test"))["command"]
    return subprocess.run(
        [sys.executable, *command[1:]],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_test_pod_gets_one_completion_and_one_refusal(manifests: list[Manifest], proxy_url: str) -> None:
    done = ask(manifests, PROXY_URL=proxy_url)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^completed: +Paris", done.stdout, re.M)
    assert re.search(r"^refused: .*max_tokens", done.stdout, re.M)


def test_the_test_pod_fails_where_no_model_answers(manifests: list[Manifest], proxy_url: str) -> None:
    done = ask(manifests, PROXY_URL=proxy_url + "/nowhere")
    assert done.returncode != 0
    assert "the list of models was answered with 404" in done.stderr
