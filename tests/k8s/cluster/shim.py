"""API groups that Kubernetes 1.20 lacks, as an aggregated API server over what it has.

`python -m tests.k8s.cluster.shim FOLDER`, in the node's network namespace. `policy/v1`, `autoscaling/v2` and
`discovery.k8s.io/v1` become their beta versions and back: of what the chart uses, only names of versions
differ. `custom.metrics.k8s.io` asks the pods for their metrics. The API server has checked who asks,
and whether they may, before anything arrives here.
"""

import json
import re
import ssl
import sys
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.k8s.cluster.api import ADMIN_TOKEN, ClusterApi, Json
from tests.k8s.cluster.network import NODE_IP

PORT = 7443
OLDER = {
    "policy/v1": "policy/v1beta1",
    "autoscaling/v2": "autoscaling/v2beta2",
    "discovery.k8s.io/v1": "discovery.k8s.io/v1beta1",
}
METRICS = "custom.metrics.k8s.io/v1beta1"
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
RESOURCES = {
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget")],
    "autoscaling/v2": [("horizontalpodautoscalers", "HorizontalPodAutoscaler")],
    "discovery.k8s.io/v1": [("endpointslices", "EndpointSlice")],
    METRICS: [("pods/any", "MetricValueList")],
}


def api_services() -> list[tuple[str, Json]]:
    """Paths and objects that make the API server send these groups here."""
    service = {
        "metadata": {"name": "shim", "namespace": "kube-system"},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": PORT}]},
    }
    objects: list[tuple[str, Json]] = [("/api/v1/namespaces/kube-system/services", service)]
    for group_version in RESOURCES:
        group, version = group_version.split("/")
        spec = {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 17000,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "shim", "namespace": "kube-system", "port": PORT},
        }
        body = {"metadata": {"name": f"{version}.{group}"}, "spec": spec}
        objects.append(("/apis/apiregistration.k8s.io/v1/apiservices", body))
    return objects


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ClusterApi

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _any(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else None
        path = urlsplit(self.path).path.rstrip("/").replace("%2A", "*")
        group_version = "/".join(path.split("/")[2:4])
        if group_version not in RESOURCES:
            self._answer(404, _status(404, "NotFound"))
        elif path == f"/apis/{group_version}":
            self._answer(200, _resource_list(group_version))
        elif group_version == METRICS:
            self._metrics(path)
        else:
            self._forward(group_version, OLDER[group_version], body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _forward(self, new: str, old: str, body: bytes | None) -> None:
        context = ssl.create_default_context(cafile=str(self.api.ca))
        connection = HTTPSConnection(self.api.host, self.api.port, context=context, timeout=3600)
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}", "accept": "application/json"}
        if body is not None:
            headers["content-type"] = self.headers.get("content-type", "application/json")
        try:
            target = self.path.replace(f"/apis/{new}", f"/apis/{old}", 1)
            connection.request(self.command, target, body and renamed(body, new, old), headers)
            self._pass_on(connection.getresponse(), old, new)
        finally:
            connection.close()

    def _pass_on(self, response: HTTPResponse, old: str, new: str) -> None:
        if "watch=" not in self.path or response.status != 200:
            self._answer(response.status, renamed(response.read(), old, new))
            return
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for line in response:
            event = renamed(line, old, new)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _metrics(self, path: str) -> None:
        found = re.fullmatch(rf"/apis/{METRICS}/namespaces/([^/]+)/pods/\*/([^/]+)", path)
        if found is None:
            self._answer(404, _status(404, "NotFound"))
            return
        selector = parse_qs(urlsplit(self.path).query).get("labelSelector", [""])[0]
        pods = self.api.items(f"/api/v1/namespaces/{found[1]}/pods", labelSelector=selector)
        values = [(pod, metric_of(pod, found[2])) for pod in pods]
        items = [_metric_value(pod, found[2], value) for pod, value in values if value is not None]
        self._answer(200, {"kind": "MetricValueList", "apiVersion": METRICS, "metadata": {}, "items": items})

    def _answer(self, status: int, body: Json | bytes) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def renamed(body: bytes, before: str, after: str) -> bytes:
    """The same object of another version of its group."""
    pattern = rb'("?apiVersion"?\s*:\s*"?)' + re.escape(before.encode()) + rb'(?=["\s,}])'
    return re.sub(pattern, lambda found: found[1] + after.encode(), body)


def metric_of(pod: Json, name: str) -> float | None:
    """The sum of a metric's series, as the pod tells it now; None where it does not."""
    ip = (pod.get("status") or {}).get("podIP")
    ports = [p for c in pod["spec"]["containers"] for p in c.get("ports") or () if p.get("name") == "http"]
    if not ip or not ports or pod["metadata"].get("deletionTimestamp"):
        return None
    connection = HTTPConnection(ip, ports[0]["containerPort"], timeout=2)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else None


def _metric_value(pod: Json, name: str, value: float) -> Json:
    metadata = pod["metadata"]
    described = {
        "kind": "Pod",
        "apiVersion": "/v1",
        "namespace": metadata["namespace"],
        "name": metadata["name"],
    }
    return {
        "describedObject": described,
        "metricName": name,
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": f"{round(value * 1000)}m",
    }


def _resource_list(group_version: str) -> Json:
    resources = [
        {"name": name + suffix, "singularName": "", "namespaced": True, "kind": kind, "verbs": VERBS}
        for name, kind in RESOURCES[group_version]
        for suffix in ("", "/status")
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": resources,
    }


def _status(code: int, reason: str) -> Json:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}


def main() -> None:
    folder = Path(sys.argv[1])
    Handler.api = ClusterApi(NODE_IP, 6443, folder / "ca.crt")
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "api.crt", folder / "api.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
