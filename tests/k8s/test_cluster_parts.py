"""What stands in for a kubelet and for newer API groups, without a control plane."""

import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.k8s.cluster import binaries
from tests.k8s.cluster.binaries import BinariesMissing
from tests.k8s.cluster.conditions import say_loudly
from tests.k8s.cluster.kubelet import addresses
from tests.k8s.cluster.kubelet.probes import ContainerHealth
from tests.k8s.cluster.kubelet.surroundings import expand, hosts_file
from tests.k8s.cluster.load import Ask, Load
from tests.k8s.cluster.shim import renamed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"apiVersion":"policy/v1","kind":"x"}', b'{"apiVersion":"policy/v1beta1","kind":"x"}'),
        (b'{"apiVersion": "policy/v1"}', b'{"apiVersion": "policy/v1beta1"}'),
        (b"apiVersion: policy/v1\nkind: x", b"apiVersion: policy/v1beta1\nkind: x"),
        (b'{"note":"policy/v1"}', b'{"note":"policy/v1"}'),
        (b'{"apiVersion":"policy/v10"}', b'{"apiVersion":"policy/v10"}'),
    ],
)
def test_only_the_version_of_an_object_is_renamed(before: bytes, after: bytes) -> None:
    assert renamed(before, "policy/v1", "policy/v1beta1") == after
    assert renamed(after, "policy/v1beta1", "policy/v1") == before


def test_names_in_arguments_are_replaced_where_they_are_known() -> None:
    assert expand("tcp://$(POD_IP):$(PORT)", {"POD_IP": "10.77.1.2"}) == "tcp://10.77.1.2:$(PORT)"


def test_services_with_an_address_have_names_in_pods() -> None:
    def service(name: str, namespace: str, address: str) -> dict[str, object]:
        return {"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": address}}

    services = [
        service("a", "demo", "10.96.0.5"),
        service("b", "other", "10.96.0.6"),
        service("c", "demo", "None"),
    ]
    assert hosts_file("demo", services) == (
        "127.0.0.1 localhost\n"
        "10.96.0.5 a a.demo a.demo.svc a.demo.svc.cluster.local\n"
        "10.96.0.6 b.other b.other.svc b.other.svc.cluster.local\n"
    )


def test_an_address_that_was_freed_is_the_next_one_taken() -> None:
    first, second = addresses.take(), addresses.take()
    assert first != second
    addresses.give_back(first)
    assert addresses.take() == first


class Probed(ContainerHealth):
    """A container whose probes answer as the test says."""

    answers: dict[str, bool]

    def _answer(self, probe: dict[str, object]) -> bool:
        return self.answers[str(probe["of"])]


def probed(**probes: dict[str, object]) -> Probed:
    quick = {kind: {"of": kind, "periodSeconds": 1e-9, **probe} for kind, probe in probes.items()}
    health = Probed(quick, "10.77.1.2", "nowhere", {})
    health.answers = dict.fromkeys(quick, True)
    return health


def test_a_container_is_started_before_it_is_asked_whether_it_is_ready() -> None:
    health = probed(startupProbe={}, readinessProbe={})
    health.answers["startupProbe"] = False
    health.ask()
    assert (health.is_started, health.is_ready) == (False, False)
    health.answers["startupProbe"] = True
    health.ask()
    assert (health.is_started, health.is_ready) == (True, False)
    health.ask()
    assert health.is_ready


def test_readiness_is_lost_after_its_threshold_and_kills_nothing() -> None:
    health = probed(readinessProbe={"failureThreshold": 2})
    health.ask()
    health.answers["readinessProbe"] = False
    health.ask()
    assert health.is_ready
    health.ask()
    assert not health.is_ready
    assert health.why_killed == ""


def test_liveness_kills_after_failures_in_a_row() -> None:
    health = probed(livenessProbe={"failureThreshold": 2})
    for is_alive in (False, True, False):
        health.answers["livenessProbe"] = is_alive
        health.ask()
    assert health.why_killed == ""
    health.ask()
    assert health.why_killed == "livenessProbe failed 2 times in a row"


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_K8S_BINARIES", str(tmp_path / "none"))
    with pytest.raises(BinariesMissing, match="none does not exist; see TANDEM_K8S_BINARIES"):
        binaries.obtain_binaries()
    monkeypatch.setenv("TANDEM_K8S_BINARIES", str(tmp_path))
    with pytest.raises(BinariesMissing, match="has no kube-apiserver"):
        binaries.obtain_binaries()


@pytest.mark.filterwarnings("default:NO KUBERNETES CONTROL PLANE")
def test_a_control_plane_that_is_not_tested_is_no_secret() -> None:
    with pytest.warns(UserWarning, match="NO KUBERNETES CONTROL PLANE IS TESTED: because"):
        assert say_loudly("because") == "NO KUBERNETES CONTROL PLANE IS TESTED: because"


def test_a_watch_line_keeps_its_resource_version() -> None:
    line = json.dumps({"type": "ADDED", "object": {"apiVersion": "discovery.k8s.io/v1beta1", "metadata": {}}})
    event = json.loads(renamed(line.encode(), "discovery.k8s.io/v1beta1", "discovery.k8s.io/v1"))
    assert event["object"]["apiVersion"] == "discovery.k8s.io/v1"


def answer_some(listener: socket.socket, answers: Sequence[bool]) -> None:
    """Each request on a connection of its own, which is closed without a word or behind an answer."""
    event = {"choices": [{"text": "x", "finish_reason": "length"}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    for is_answered in answers:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            if is_answered:
                head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                connection.sendall(head + body)


def read_request(connection: socket.socket) -> None:
    """All of it: what is unread when the connection is closed would reset it."""
    with connection.makefile("rb") as request:
        num_bytes = 0
        while line := request.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                num_bytes = int(value)
        request.read(num_bytes)


@pytest.mark.parametrize(
    ("repeats_unanswered", "answers", "num_failures"),
    [
        (False, (True, False), 1),
        (True, (True, False, True), 0),
        (True, (True, False, True, False), 1),  # once
        (True, (False, True), 1),  # nothing was kept that could have crossed with its end
    ],
)
def test_only_who_may_repeat_it_repeats_a_request_without_an_answer(
    repeats_unanswered: bool, answers: Sequence[bool], num_failures: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, httpx.Client(trust_env=False) as client:
        threading.Thread(target=answer_some, args=(listener, answers), daemon=True).start()
        load = Load(f"http://127.0.0.1:{listener.getsockname()[1]}", (), {}, repeats_unanswered)
        load._stopping.set()  # so that nobody waits after a failure
        for _ in answers:
            load._one(client, Ask("a", 1))
    assert (load.num_ok, len(load.failures), load.num_cut) == (sum(answers), num_failures, 0)
