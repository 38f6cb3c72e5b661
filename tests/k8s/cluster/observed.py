"""What tests see of a cluster's release: engines as the proxy and the pods know them, rights, replicas."""

from http.client import HTTPException

import httpx

from tests.k8s.cluster.api import ApiFailure
from tests.k8s.cluster.control_plane import eventually
from tests.k8s.cluster.running import NAMESPACE, Cluster

PORTS = {"prompt": 7001, "completion": 7002}


def engine_urls(proxy_url: str) -> set[str]:
    """Of those that the proxy calls ready."""
    state = httpx.get(f"{proxy_url}/health/ready", timeout=10.0, trust_env=False).json()
    return {engine["url"] for engine in state["engines"] if engine["ready"]}


def pod_urls(cluster: Cluster, role: str) -> set[str]:
    return {f"http://{pod['status']['podIP']}:{PORTS[role]}" for pod in cluster.ready_pods(role)}


def all_engines(cluster: Cluster) -> set[str]:
    return pod_urls(cluster, "prompt") | pod_urls(cluster, "completion")


def engines_by_address(cluster: Cluster) -> dict[str, str]:
    """Who says at each completion pod's address to be there."""
    answers = {
        url: httpx.get(f"{url}/info", timeout=10.0, trust_env=False)
        for url in pod_urls(cluster, "completion")
    }
    return {url: answer.json()["engine_id"] for url, answer in answers.items()}


def may(
    cluster: Cluster, account: str, verb: str, resource: str, group: str = "", namespace: str = NAMESPACE
) -> bool:
    """Whether the API server would let a service account of the release do this."""
    attributes = {"namespace": namespace, "verb": verb, "resource": resource, "group": group}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{NAMESPACE}:{account}", "resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(cluster.api.create(path, review)["status"]["allowed"])


def scale(cluster: Cluster, deployment: str, replicas: int) -> None:
    """As soon as the API server takes it."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}"

    def is_scaled() -> bool:
        try:
            cluster.api.patch(path, {"spec": {"replicas": replicas}})
        except (OSError, HTTPException, ApiFailure):
            return False
        return True

    eventually(is_scaled, f"{deployment} has {replicas} replicas", 60.0)
