"""etcd, API server, controller manager and scheduler as child processes in the node's namespace."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tests.k8s.cluster.api import ADMIN_TOKEN, ApiFailure, ClusterApi
from tests.k8s.cluster.binaries import Binaries
from tests.k8s.cluster.certificates import Certificates, make_certificates
from tests.k8s.cluster.network import NODE_IP, SERVICE_RANGE
from tests.k8s.tools import REPOSITORY

API_PORT = 6443
START_TIMEOUT_S = 90.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for what other processes do; an AssertionError says what did not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)


class Child:
    """A process and its log; it ends with its owner."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._log: BinaryIO = self.log_path.open("ab")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "GOMAXPROCS": "2", "NO_PROXY": "*"},
            start_new_session=True,
        )

    def stop(self, timeout_s: float = 5.0) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]


class ControlPlane:
    """Owns the four processes; started and stopped in the node's namespace."""

    def __init__(self, binaries: Binaries, folder: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._children: dict[str, Child] = {}
        self.certificates: Certificates = make_certificates(folder)
        self.api = ClusterApi(NODE_IP, API_PORT, self.certificates.ca)
        self.kubeconfig = folder / "kubeconfig"
        self._write_files()

    def start(self) -> None:
        self._start("etcd", self._etcd())
        self.start_api_server()
        for name, program, options in (
            ("controller-manager", self._binaries.controller_manager, self._controller_options()),
            ("scheduler", self._binaries.scheduler, ["--kubeconfig=kubeconfig", "--leader-elect=false"]),
        ):
            self._start(name, [str(program), *options])

    def start_api_server(self) -> None:
        """Returns once it is ready."""
        self._start("apiserver", self._api_server())
        eventually(self._is_ready, "the API server is ready", START_TIMEOUT_S)

    def stop_api_server(self) -> None:
        child = self._children.pop("apiserver")
        child.process.kill()
        child.stop()

    def stop(self) -> None:
        for child in reversed(self._children.values()):
            child.stop(3.0)
        self._children.clear()

    def start_python(self, name: str, module: str, *arguments: str) -> Child:
        """A helper of this package, as a process of its own."""
        return self._start(name, [sys.executable, "-m", module, *arguments])

    def _start(self, name: str, command: list[str]) -> Child:
        child = self._children[name] = Child(name, command, self._folder)
        return child

    def _is_ready(self) -> bool:
        child = self._children["apiserver"]
        assert child.process.poll() is None, f"the API server ended: {child.log_tail()}"
        try:
            self.api.get("/api/v1/namespaces/default")
        except (OSError, ApiFailure):
            return False
        return True

    def _write_files(self) -> None:
        (self._folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
        self.kubeconfig.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n"
            f"clusters: [{{name: test, cluster: {{server: 'https://{NODE_IP}:{API_PORT}', "
            f"certificate-authority: {self.certificates.ca}}}}}]\n"
            f"users: [{{name: admin, user: {{token: {ADMIN_TOKEN}}}}}]\n"
            "contexts: [{name: test, context: {cluster: test, user: admin}}]\n"
        )

    def _etcd(self) -> list[str]:
        return [
            str(self._binaries.etcd),
            "--data-dir=etcd",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_server(self) -> list[str]:
        path = self.certificates.path
        return [
            str(self._binaries.apiserver),
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            f"--advertise-address={NODE_IP}",
            f"--secure-port={API_PORT}",
            f"--tls-cert-file={path('api.crt')}",
            f"--tls-private-key-file={path('api.key')}",
            f"--client-ca-file={path('ca.crt')}",
            "--token-auth-file=tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={path('sa.pub')}",
            f"--service-account-signing-key-file={path('sa.key')}",
            "--api-audiences=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            f"--requestheader-client-ca-file={path('front-ca.crt')}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={path('front.crt')}",
            f"--proxy-client-key-file={path('front.key')}",
            "--feature-gates=EndpointSliceTerminatingCondition=true",
        ]

    def _controller_options(self) -> list[str]:
        return [
            "--kubeconfig=kubeconfig",
            f"--service-account-private-key-file={self.certificates.path('sa.key')}",
            f"--root-ca-file={self.certificates.ca}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            "--controllers=*",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
            "--node-monitor-grace-period=40s",
            "--feature-gates=EndpointSliceTerminatingCondition=true",
        ]
