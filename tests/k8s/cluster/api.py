"""The cluster's API as the tests and the kubelet use it: JSON over HTTP, nothing in between."""

import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
ADMIN_TOKEN = "admin-of-the-test-cluster"


class ApiFailure(Exception):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body.decode(errors='replace')[:500]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class ClusterApi:
    """One API server; a connection for each call, so that any thread may make it."""

    host: str
    port: int
    ca: Path
    token: str = ADMIN_TOKEN

    def get(self, path: str, **query: str) -> Json:
        return self._call("GET", path, None, query)

    def items(self, path: str, **query: str) -> list[Json]:
        return list(self.get(path, **query)["items"] or ())

    def create(self, path: str, body: Json) -> Json:
        return self._call("POST", path, body, {})

    def patch(self, path: str, body: Json, kind: str = MERGE) -> Json:
        return self._call("PATCH", path, body, {}, kind)

    def delete(self, path: str, body: Json | None = None) -> None:
        self._call("DELETE", path, body, {})

    def watch(self, path: str, **query: str) -> Iterator[tuple[str, Json]]:
        """Kinds of change and objects: all there are, then what happens to them, until the server ends it."""
        connection = self._connect(timeout_s=60.0)
        try:
            response = self._ask(
                connection, "GET", path, None, {"watch": "1", "timeoutSeconds": "40", **query}
            )
            for line in response:
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            connection.close()

    def _call(
        self, method: str, path: str, body: Json | None, query: dict[str, str], kind: str = "application/json"
    ) -> Json:
        connection = self._connect(timeout_s=20.0)
        try:
            answer: Json = json.loads(self._ask(connection, method, path, body, query, kind).read())
            return answer
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.ca))
        return http.client.HTTPSConnection(self.host, self.port, context=context, timeout=timeout_s)

    def _ask(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: Json | None,
        query: dict[str, str],
        kind: str = "application/json",
    ) -> http.client.HTTPResponse:
        headers = {
            "authorization": f"Bearer {self.token}",
            "content-type": kind,
            "accept": "application/json",
        }
        target = f"{path}?{urlencode(query)}" if query else path
        connection.request(method, target, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 300:
            raise ApiFailure(response.status, response.read())
        return response
