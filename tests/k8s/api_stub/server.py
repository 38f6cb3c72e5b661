"""The HTTP server and what tests do with it."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tests.k8s.api_stub.faults import Faults
from tests.k8s.api_stub.handler import StubServer
from tests.k8s.api_stub.resources import BY_KIND, BY_PLURAL
from tests.k8s.api_stub.selectors import Manifest
from tests.k8s.api_stub.store import Store
from tests.k8s.api_stub.workloads import Workloads

PodPhase = Literal["Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request that came; `verb` as in a Role."""

    verb: str
    plural: str
    namespace: str
    user: str


class ApiStub:
    """See the package. A context manager; its store outlives `stop` and `start`."""

    def __init__(
        self,
        version: str = "1.37",
        run_workloads: bool = True,
        outcome_of_pod: Callable[[Manifest], PodPhase] = lambda pod: "Succeeded",
    ) -> None:
        self.version = version
        self.store = Store(version)
        self.faults = Faults(self.store)
        self.calls: list[Call] = []
        self.num_watches: dict[str, int] = {}
        self._workloads = Workloads(self.store, outcome_of_pod) if run_workloads else None
        self._port = 0
        self._server: StubServer | None = None

    def __enter__(self) -> "ApiStub":
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        assert self._server is None
        self._server = StubServer(self, self._port)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Close the port and every connection, in the middle of whatever they were saying."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        cluster = {"name": "stub", "cluster": {"server": self.url}}
        context = {"name": "stub", "context": {"cluster": "stub", "user": "stub", "namespace": namespace}}
        user = {"name": "stub", "user": {}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "stub"}
        config |= {"clusters": [cluster], "contexts": [context], "users": [user]}
        path.write_text(json.dumps(config))
        return path

    def put(self, manifest: Manifest, namespace: str = "default") -> Manifest:
        """Create the object or replace it; a status goes with it."""
        resource = BY_KIND[manifest["apiVersion"], manifest["kind"]]
        place = namespace if resource.is_namespaced else ""
        key = (resource.plural, place, manifest["metadata"]["name"])
        with self.store.changed:
            if any(m["metadata"]["name"] == key[2] for m in self.store.find(resource, place)[0]):
                return self.store.update(resource, key, manifest, "test")
            return self.store.create(resource, place, manifest, "test")

    def put_pod(
        self,
        name: str,
        ip: str | None,
        labels: dict[str, str],
        is_ready: bool = True,
        port: int = 7001,
        namespace: str = "default",
    ) -> Manifest:
        """A running pod with one container `engine` whose port `http` is `port`; a new one has a new uid."""
        container = {"name": "engine", "image": "none", "ports": [{"name": "http", "containerPort": port}]}
        manifest: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": "node", "containers": [container]},
            "status": {"phase": "Running" if ip else "Pending", "conditions": [_ready(is_ready)]},
        }
        if ip:
            manifest["status"] |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        return self.put(manifest, namespace)

    def set_pod(
        self,
        name: str,
        is_ready: bool | None = None,
        labels: dict[str, str] | None = None,
        namespace: str = "default",
    ) -> Manifest:
        """Change what is given of a pod."""
        with self.store.changed:
            pod = self.get("pods", name, namespace)
            if is_ready is not None:
                pod["status"]["conditions"] = [_ready(is_ready)]
            if labels is not None:
                pod["metadata"]["labels"] = labels
            return self.store.update(BY_PLURAL["pods"], ("pods", namespace, name), pod, "test")

    def get(self, plural: str, name: str, namespace: str = "default") -> Manifest:
        return self.store.get(BY_PLURAL[plural], namespace, name)

    def find(self, plural: str, namespace: str = "default", label_selector: str = "") -> list[Manifest]:
        return self.store.find(BY_PLURAL[plural], namespace, label_selector)[0]

    def delete(self, plural: str, name: str, namespace: str = "default", grace_s: int | None = None) -> None:
        """A pod is terminating until this is called with `grace_s=0`."""
        self.store.delete(BY_PLURAL[plural], (plural, namespace, name), grace_s)

    def scale(self, name: str, replicas: int, namespace: str = "default") -> None:
        """As an autoscaler does it."""
        with self.store.changed:
            deployment = self.get("deployments", name, namespace)
            deployment["spec"]["replicas"] = replicas
            key = ("deployments", namespace, name)
            self.store.update(BY_PLURAL["deployments"], key, deployment, "horizontal-pod-autoscaler")
        self.settle()

    def wait_for_watches(self, plural: str, number: int, timeout_s: float = 10.0) -> None:
        """Until so many watches of these resources are open."""
        with self.store.changed:
            done = self.store.changed.wait_for(lambda: self.num_watches.get(plural, 0) == number, timeout_s)
        assert done, f"{self.num_watches.get(plural, 0)} watches of {plural}, not {number}"

    def count(self, verb: str, plural: str) -> int:
        """Requests of this kind so far."""
        return sum((call.verb, call.plural) == (verb, plural) for call in self.calls)

    def settle(self) -> None:
        """Called after every write: workloads take note."""
        if self._workloads is not None:
            self._workloads.settle()


def _ready(is_ready: bool) -> dict[str, Any]:
    return {"type": "Ready", "status": "True" if is_ready else "False"}
