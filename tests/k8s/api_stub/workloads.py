"""Says of workloads that their pods are there, and of a hook's pod how it ended."""

from collections.abc import Callable

from tests.k8s.api_stub.resources import BY_PLURAL
from tests.k8s.api_stub.selectors import Manifest
from tests.k8s.api_stub.store import Store


class Workloads:
    def __init__(self, store: Store, outcome_of_pod: Callable[[Manifest], str]) -> None:
        self._store = store
        self._outcome_of_pod = outcome_of_pod

    def settle(self) -> None:
        """Bring every status in line with its spec."""
        with self._store.changed:
            for plural in ("deployments", "statefulsets"):
                for manifest in self._store.find(BY_PLURAL[plural])[0]:
                    self._set_status(plural, manifest, _finished(manifest))
            for budget in self._store.find(BY_PLURAL["poddisruptionbudgets"])[0]:
                self._set_status("poddisruptionbudgets", budget, _kept(budget))
            for pod in self._store.find(BY_PLURAL["pods"])[0]:
                if "helm.sh/hook" in pod["metadata"].get("annotations", {}) and "status" not in pod:
                    self._set_status("pods", pod, {"phase": self._outcome_of_pod(pod)})

    def _set_status(self, plural: str, manifest: Manifest, status: Manifest) -> None:
        metadata = manifest["metadata"]
        key = (plural, metadata["namespace"], metadata["name"])
        if manifest.get("status") != status:
            self._store.update(BY_PLURAL[plural], key, {**manifest, "status": status}, "controller")


def _kept(budget: Manifest) -> Manifest:
    """Nothing is missing, and nothing more may go."""
    counts = {"currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1, "disruptionsAllowed": 0}
    return {**counts, "observedGeneration": budget["metadata"]["generation"]}


def _finished(manifest: Manifest) -> Manifest:
    replicas = manifest["spec"].get("replicas", 1)
    counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    status: Manifest = dict.fromkeys(counts, replicas)
    status["observedGeneration"] = manifest["metadata"]["generation"]
    if manifest["kind"] == "Deployment":
        reasons = {"Available": "MinimumReplicasAvailable", "Progressing": "NewReplicaSetAvailable"}
        status["conditions"] = [{"type": t, "status": "True", "reason": r} for t, r in reasons.items()]
    return status
