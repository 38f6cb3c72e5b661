"""`python -m tests.k8s.cluster.kubelet FOLDER`: a node whose pods are processes in network namespaces.

Reads `FOLDER/node.json` (`NodeSettings`), and runs in the node's network namespace until SIGTERM.

1. register   the node is ready, and says so every few seconds
2. follow     every pod that is bound to the node gets a `PodRunner`; a marked one is told to end
3. forward    Services have addresses on the node (`services`)
"""

import json
import signal
import sys
import threading
from http.client import HTTPException
from pathlib import Path

from tests.k8s.cluster.api import STRATEGIC, ApiFailure, ClusterApi, Json
from tests.k8s.cluster.kubelet.node import NodeSettings, node_status
from tests.k8s.cluster.kubelet.pod import PodRunner
from tests.k8s.cluster.kubelet.services import ServiceForwarder

HEARTBEAT_S = 5.0


class Kubelet:
    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._api = ClusterApi(settings.api_host, settings.api_port, Path(settings.ca), settings.token)
        self._pods: dict[str, PodRunner] = {}
        self._stopping = threading.Event()
        self._services = ServiceForwarder(self._api)

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        self._register()
        for work in (self._follow_pods, self._services.run):
            threading.Thread(target=self._again_and_again, args=(work,), daemon=True).start()
        while not self._stopping.wait(HEARTBEAT_S):
            try:
                self._heartbeat()
            except (OSError, HTTPException, ApiFailure) as error:
                print(f"heartbeat: {error!r}", flush=True)
        for pod in list(self._pods.values()):
            pod.kill()

    def _register(self) -> None:
        name = self._settings.node_name
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        try:
            self._api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        except ApiFailure as error:
            if error.status != 409:
                raise
        self._heartbeat()

    def _heartbeat(self) -> None:
        path = f"/api/v1/nodes/{self._settings.node_name}/status"
        self._api.patch(path, {"status": node_status(self._settings)}, STRATEGIC)

    def _again_and_again(self, work: object) -> None:
        assert callable(work)
        while not self._stopping.is_set():
            try:
                work()
            except (OSError, HTTPException, ApiFailure, json.JSONDecodeError) as error:
                print(f"{work}: {error!r}", flush=True)
                self._stopping.wait(0.5)

    def _follow_pods(self) -> None:
        """One watch from its beginning; what a broken one missed, the next one's beginning says."""
        selector = f"spec.nodeName={self._settings.node_name}"
        for kind, pod in self._api.watch("/api/v1/pods", fieldSelector=selector):
            self._on_pod(kind, pod)

    def _on_pod(self, kind: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        runner = self._pods.get(uid)
        if kind == "DELETED":
            if runner is not None:
                runner.end(0.0)
                del self._pods[uid]
        elif pod["metadata"].get("deletionTimestamp"):
            if runner is not None:
                runner.end(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        elif runner is None and (pod.get("status") or {}).get("phase") in (None, "Pending", "Running"):
            runner = self._pods[uid] = PodRunner(self._settings, self._api, pod)
            runner.start()


def main() -> None:
    folder = Path(sys.argv[1])
    Kubelet(NodeSettings(**json.loads((folder / "node.json").read_text()))).run()


main()
