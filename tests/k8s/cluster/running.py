"""A running cluster of one node, and what tests do with it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.k8s.cluster.api import ApiFailure, ClusterApi, Json
from tests.k8s.cluster.binaries import Binaries
from tests.k8s.cluster.control_plane import Child, ControlPlane, eventually
from tests.k8s.cluster.kubelet.node import NodeSettings
from tests.k8s.cluster.kubelet.surroundings import POD_VARIABLE
from tests.k8s.cluster.network import NODE_IP
from tests.k8s.cluster.shim import OLDER, api_services
from tests.k8s.tools import REPOSITORY, Tools

CHART = REPOSITORY / "helm" / "tandem"
NAMESPACE = "demo"
RELEASE = "tandem"
HELM_TIMEOUT_S = 280


class Cluster:
    """Everything between the binaries and the pods; made, used and closed in the node's network namespace."""

    def __init__(self, binaries: Binaries, tools: Tools) -> None:
        self._tools = tools
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-cluster-"))
        self.plane = ControlPlane(binaries, self.folder)
        self._kubelet: Child | None = None
        self.chart = self._copy_of_the_chart()

    @property
    def api(self) -> ClusterApi:
        return self.plane.api

    def start(self) -> None:
        self.plane.start()
        self.plane.start_python("shim", "tests.k8s.cluster.shim", str(self.folder))
        for path, body in api_services():
            self.api.create(path, body)
        self._write_node()
        self._kubelet = self.plane.start_python("kubelet", "tests.k8s.cluster.kubelet", str(self.folder))
        self.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        eventually(self._is_whole, "the added API groups answer, the node is there, accounts have tokens")

    def close(self) -> None:
        if self._kubelet is not None:
            self._kubelet.stop(20.0)
        self.plane.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _is_whole(self) -> bool:
        try:
            for group_version in OLDER:
                self.api.get(f"/apis/{group_version}")
            self.api.get(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default")
            return bool(self.api.items("/api/v1/nodes"))
        except (OSError, ApiFailure):
            return False

    def _write_node(self) -> None:
        python = Path(sys.executable)
        settings = NodeSettings(
            node_name="node-1",
            folder=str(self.folder),
            api_host=NODE_IP,
            api_port=self.api.port,
            ca=str(self.api.ca),
            token=self.api.token,
            cpus="8",
            memory="16Gi",
            environment={
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
            },
            working_directory=str(REPOSITORY),
        )
        (self.folder / "node.json").write_text(json.dumps(asdict(settings)))

    def _copy_of_the_chart(self) -> Path:
        """This control plane is older than what the chart asks for; what it lacks, the shim adds."""
        copy = self.folder / "chart"
        shutil.copytree(CHART, copy)
        metadata = yaml.safe_load((copy / "Chart.yaml").read_text())
        metadata.pop("kubeVersion", None)
        (copy / "Chart.yaml").write_text(yaml.safe_dump(metadata))
        return copy

    def leave_no_grace(self) -> None:
        """From here on the chart has pods killed as soon as they are to go."""
        template = self.chart / "templates" / "_pod.tpl"
        text = template.read_text()
        computed = '{{ include "tandem.terminationGrace" . }}'
        assert text.count(computed) == 1
        template.write_text(text.replace(computed, "0"))

    def helm(self, *arguments: str) -> str:
        """What helm printed; an AssertionError with its errors and the pods' logs where it failed."""
        done = subprocess.run(
            [
                str(self._tools.helm),
                *arguments,
                "--namespace",
                NAMESPACE,
                "--kubeconfig",
                str(self.plane.kubeconfig),
            ],
            env={**os.environ, "HELM_CACHE_HOME": str(self.folder / "helm"), "NO_PROXY": "*"},
            capture_output=True,
            text=True,
            timeout=HELM_TIMEOUT_S + 60,
        )
        assert done.returncode == 0, f"helm {arguments[0]}: {done.stderr}\n{self.report()}"
        return done.stdout

    def apply_chart(
        self, action: str, files: Sequence[Path], values: Mapping[str, Any], *options: str
    ) -> str:
        """`helm install` or `upgrade` of the release, waiting until everything is ready."""
        arguments = [action, RELEASE, str(self.chart), "--wait", f"--timeout={HELM_TIMEOUT_S}s"]
        # Server-side apply needs schemas of every group, which aggregated ones do not have.
        arguments.append("--server-side=false")
        for file in files:
            arguments += ["--values", str(file)]
        for name, value in values.items():
            arguments += ["--set-json", f"{name}={json.dumps(value)}"]
        return self.helm(*arguments, *options)

    def pods(self, role: str) -> list[Json]:
        """Those that are not on their way out."""
        return [pod for pod in self.all_pods(role) if not pod["metadata"].get("deletionTimestamp")]

    def all_pods(self, role: str) -> list[Json]:
        selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={role}"
        return self.api.items(f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector=selector)

    def ready_pods(self, role: str) -> list[Json]:
        return [pod for pod in self.pods(role) if is_ready(pod)]

    def url(self, role: str, port: int) -> str:
        """Of the only ready pod of a role."""
        (pod,) = self.ready_pods(role)
        return f"http://{pod['status']['podIP']}:{port}"

    def service_url(self, name: str) -> str:
        service = self.api.get(f"/api/v1/namespaces/{NAMESPACE}/services/{name}")
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def logs(self, contains: str = "") -> str:
        paths = sorted((self.folder / "pods").glob(f"*{contains}*/*.log"))
        return "\n".join(
            f"== {path.parent.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths
        )

    def log_of(self, pod_name: str) -> str:
        """All that its engine has said; also after it left."""
        (path,) = (self.folder / "pods").glob(f"{pod_name}-*/engine.log")
        return path.read_text(errors="replace")

    def kubelet_log(self) -> str:
        assert self._kubelet is not None
        return self._kubelet.log_path.read_text()

    def memory_mib(self, role: str) -> float:
        """Resident memory of the processes of a role's only ready pod."""
        (pod,) = self.ready_pods(role)
        uid = pod["metadata"]["uid"][:8]
        processes = [p for p in psutil.process_iter() if _is_of_pod(p, uid)]
        return sum(process.memory_info().rss for process in processes) / (1 << 20)

    def report(self) -> str:
        """Everything that may say why something did not come about."""
        pods = self.api.items(f"/api/v1/namespaces/{NAMESPACE}/pods")
        states = [
            (pod["metadata"]["name"], pod.get("status", {}).get("phase"), is_ready(pod)) for pod in pods
        ]
        events = self.api.items(f"/api/v1/namespaces/{NAMESPACE}/events")
        said = [f"{event['involvedObject']['name']}: {event.get('message')}" for event in events[-15:]]
        kubelet = self._kubelet.log_tail() if self._kubelet else ""
        return f"pods: {states}\nevents: {said}\nkubelet: {kubelet}\n{self.logs()}"


def _is_of_pod(process: psutil.Process, uid: str) -> bool:
    try:
        return process.environ().get(POD_VARIABLE, "").startswith(uid)
    except psutil.Error:
        return False


def is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
