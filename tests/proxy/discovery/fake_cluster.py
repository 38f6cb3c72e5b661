"""An API server that knows EndpointSlices of one namespace, with the faults that a watch meets."""

import json
import queue
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/apis/discovery.k8s.io/v1/namespaces/demo/endpointslices"
END, CUT = object(), object()
"""What ends a watch: properly, or in the middle of a chunk."""


def slice_json(name: str, *numbers: int, **conditions: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "ports": [{"name": "http", "port": 7001}],
        "endpoints": [
            {
                "addresses": [f"10.0.0.{number}"],
                "targetRef": {"kind": "Pod", "uid": f"pod-{number}"},
                "conditions": conditions or {"ready": True},
            }
            for number in numbers
        ],
    }


@dataclass
class FakeCluster:
    """Lists `items`; watches get what is put into `events`; `refusals` are answered first, in order."""

    items: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    events: "queue.Queue[object]" = field(default_factory=queue.Queue)
    queries: list[dict[str, str]] = field(default_factory=list)
    resource_version: int = 1

    def __enter__(self) -> "FakeCluster":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.events.put(END)
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def tell(self, kind: str, value: dict[str, Any]) -> None:
        self.events.put({"type": kind, "object": value})


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            target = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            cluster.queries.append(query)
            if target.path != PATH:
                self._answer(404, {})
            elif cluster.refusals:
                self._answer(cluster.refusals.pop(0), {"kind": "Status"})
            elif "watch" in query:
                self._watch()
            else:
                metadata = {"resourceVersion": str(cluster.resource_version)}
                self._answer(200, {"metadata": metadata, "items": cluster.items})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _watch(self) -> None:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while (event := cluster.events.get()) is not END:
                if event is CUT:
                    self.wfile.write(b"ff\r\n{half")
                    self.close_connection = True
                    return
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    return Handler
