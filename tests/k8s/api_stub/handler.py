"""One HTTP request: who asks for what, and its answer."""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.k8s.api_stub import protobuf
from tests.k8s.api_stub.access import check_access, user_of
from tests.k8s.api_stub.fields import merge, strategic_merge
from tests.k8s.api_stub.openapi import openapi
from tests.k8s.api_stub.resources import BY_PATH, RESOURCES, Resource
from tests.k8s.api_stub.selectors import Manifest
from tests.k8s.api_stub.store import ApiError, Key
from tests.k8s.api_stub.watching import Watch

if TYPE_CHECKING:
    from tests.k8s.api_stub.server import ApiStub

DEFAULT_WATCH_S = 1800


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    resource: Resource
    namespace: str
    name: str
    subresource: str

    @property
    def key(self) -> Key:
        return self.resource.plural, self.namespace, self.name


class StubServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, stub: "ApiStub", port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.stub = stub
        self.is_stopping = False
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""

    def stop(self) -> None:
        self.is_stopping = True
        self.shutdown()
        self.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self.stub.store.changed:
            self.stub.store.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        try:
            self._route(body)
        except ApiError as error:
            self._answer(error.code, error.status())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _route(self, body: bytes) -> None:
        url = urlsplit(self.path)
        self._query = {name: values[0] for name, values in parse_qs(url.query).items()}
        parts = [unquote(part) for part in url.path.split("/") if part]
        if not parts or parts[0] not in ("api", "apis"):
            self._answer(200, _outside_of_api(parts, self.server.stub.version))
        elif (described := _discovery(parts)) is not None:
            self._answer(200, described)
        else:
            self._act(_target(parts), body)

    def _act(self, target: Target, body: bytes) -> None:
        stub, plural = self.server.stub, target.resource.plural
        verb = self._verb(target)
        user = user_of(self.headers.get("Authorization") or "")
        stub.calls.append(self._call(verb, target, user))
        stub.faults.check(verb, plural)
        where = (target.subresource, target.namespace, target.name)
        check_access(stub.store, user, verb, target.resource, *where)
        if verb == "watch":
            self._watch(target)
        elif verb == "list":
            self._list(target)
        elif verb == "get":
            self._get(target)
        else:
            status, answer = self._write(verb, target, self._decode(body))
            stub.settle()
            self._answer(status, answer)

    def _call(self, verb: str, target: Target, user: str) -> Any:
        from tests.k8s.api_stub.server import Call

        return Call(verb, target.resource.plural, target.namespace, user)

    def _asks_for(self, option: str) -> bool:
        """As Kubernetes reads truth values; version 36 of its client for Python says True."""
        return self._query.get(option, "").lower() not in ("", "0", "false")

    def _verb(self, target: Target) -> Any:
        if self.command == "GET" and not target.name:
            return "watch" if self._asks_for("watch") else "list"
        return {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[
            self.command
        ]

    def _decode(self, body: bytes) -> Any:
        if body.startswith(protobuf.MAGIC):
            return protobuf.decode(body)
        return yaml.safe_load(body) if "yaml" in self._content_type else json.loads(body or b"{}")

    @property
    def _content_type(self) -> str:
        return self.headers.get("Content-Type") or ""

    @property
    def _manager(self) -> str:
        agent = (self.headers.get("User-Agent") or "unknown").split("/")[0]
        return self._query.get("fieldManager") or agent

    @property
    def _selectors(self) -> tuple[str, str]:
        return self._query.get("labelSelector", ""), self._query.get("fieldSelector", "")

    def _list(self, target: Target) -> None:
        items, version = self.server.stub.store.find(target.resource, target.namespace, *self._selectors)
        body = {"kind": f"{target.resource.kind}List", "apiVersion": target.resource.api_version}
        self._answer(200, {**body, "metadata": {"resourceVersion": str(version)}, "items": items})

    def _get(self, target: Target) -> None:
        manifest = self.server.stub.store.get(target.resource, target.namespace, target.name)
        if target.subresource == "scale":
            manifest = _scale(manifest)
        elif target.subresource == "log":
            manifest = {}
        self._answer(200, manifest)

    def _write(self, verb: str, target: Target, body: Any) -> tuple[int, Manifest]:
        store, resource = self.server.stub.store, target.resource
        if verb == "create":
            return 201, store.create(resource, target.namespace, body, self._manager)
        if verb == "delete":
            return 200, store.delete(resource, target.key, body.get("gracePeriodSeconds"))
        if "apply-patch" in self._content_type:
            force = self._query.get("force") == "true"
            where = (target.namespace, target.name)
            return 200, store.apply(resource, *where, body, self._manager, force)
        with store.changed:
            old = store.get(resource, target.namespace, target.name)
            new = store.update(resource, target.key, self._changed(verb, target, old, body), self._manager)
            return 200, _scale(new) if target.subresource == "scale" else new

    def _changed(self, verb: str, target: Target, old: Manifest, body: Any) -> Manifest:
        """What an update or a patch makes of an object."""
        if target.subresource == "scale":
            return {**old, "spec": {**old["spec"], "replicas": body["spec"]["replicas"]}}
        if verb == "update":
            wanted = dict(body)
        elif "json-patch" in self._content_type:
            raise ApiError(415, "UnsupportedMediaType", "JSON patch")
        else:
            wanted = json.loads(json.dumps(old))
            patch: Callable[[Manifest, Manifest], None] = (
                strategic_merge if "strategic" in self._content_type else merge
            )
            patch(wanted, body)
        if target.subresource == "status":
            return {**old, "status": wanted.get("status")}
        return {**wanted, "status": old["status"]} if "status" in old else wanted

    def _watch(self, target: Target) -> None:
        end_s = time.monotonic() + float(self._query.get("timeoutSeconds") or DEFAULT_WATCH_S)
        watch = Watch(
            self.server.stub,
            target.resource,
            target.namespace,
            self._selectors,
            is_stopping=lambda: self.server.is_stopping,
            wants_bookmarks=self._asks_for("allowWatchBookmarks"),
            begins_with_list=self._asks_for("sendInitialEvents"),
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        has_ended = watch.run(self.wfile, int(self._query.get("resourceVersion") or 0), end_s)
        self.close_connection = not has_ended


def _target(parts: list[str]) -> Target:
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    name, subresource = (*rest[1:3], "", "")[:2]
    resource = BY_PATH.get((group, version, rest[0]))
    if resource is None:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return Target(resource, namespace, name, subresource)


def _outside_of_api(parts: list[str], version: str) -> object:
    if parts == ["version"]:
        major, minor = version.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{version}.0", "platform": "linux/amd64"}
    if parts and parts[0] == "openapi":
        return openapi(parts[1:])
    return "ok"


def _discovery(parts: list[str]) -> Manifest | None:
    """The lists of versions, groups and resources; None for other paths."""
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        groups = sorted({(r.group, r.version) for r in RESOURCES if r.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*group) for group in groups]}
    api_version = "/".join(parts[1:])
    if len(parts) != (2 if parts[0] == "api" else 3):
        return None
    found = [resource.described() for resource in RESOURCES if resource.api_version == api_version]
    if not found:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version}
    return {**body, "resources": found}


def _group(group: str, version: str) -> Manifest:
    described = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [described], "preferredVersion": described}


def _scale(manifest: Manifest) -> Manifest:
    metadata = {k: manifest["metadata"][k] for k in ("name", "namespace", "resourceVersion", "uid")}
    spec = {"replicas": manifest["spec"].get("replicas", 1)}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": spec,
        "status": spec,
    }
