"""Addresses of Services: the node listens on them and forwards each connection to a ready pod."""

import asyncio
import contextlib
import subprocess
import threading
import time
from itertools import count

from tests.k8s.cluster.api import ApiFailure, ClusterApi, Json

REFRESH_S = 0.5
Target = tuple[str, int]


class ServiceForwarder:
    """Looks at Services and Endpoints twice a second; `run` until it fails, then again."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._targets: dict[Target, list[Target]] = {}
        self._servers: dict[Target, asyncio.Server] = {}
        self._turns = count()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self) -> None:
        while True:
            self._targets = dict(self._find())
            for address in self._targets.keys() - self._servers.keys():
                subprocess.run(["ip", "addr", "add", f"{address[0]}/32", "dev", "lo"], capture_output=True)
                asyncio.run_coroutine_threadsafe(self._listen(address), self._loop).result(5.0)
            time.sleep(REFRESH_S)

    def _find(self) -> list[tuple[Target, list[Target]]]:
        found: list[tuple[Target, list[Target]]] = []
        for service in self._api.items("/api/v1/services"):
            spec, metadata = service["spec"], service["metadata"]
            if spec.get("clusterIP") in (None, "", "None") or not spec.get("selector"):
                continue
            try:
                path = f"/api/v1/namespaces/{metadata['namespace']}/endpoints/{metadata['name']}"
                endpoints = self._api.get(path)
            except ApiFailure as error:
                if error.status != 404:
                    raise
                continue
            for port in spec["ports"]:
                found.append(((spec["clusterIP"], int(port["port"])), _addresses(endpoints, port)))
        return found

    async def _listen(self, address: Target) -> None:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._forward(address, reader, writer)

        self._servers[address] = await asyncio.start_server(forward, *address)

    async def _forward(
        self, address: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = self._targets.get(address) or []
        with contextlib.suppress(OSError):
            if targets:
                host, port = targets[next(self._turns) % len(targets)]
                far_reader, far_writer = await asyncio.open_connection(host, port)
                await asyncio.gather(
                    _pump(reader, far_writer), _pump(far_reader, writer), return_exceptions=True
                )
        writer.close()


def _addresses(endpoints: Json, port: Json) -> list[Target]:
    return [
        (address["ip"], int(each["port"]))
        for subset in endpoints.get("subsets") or ()
        for each in subset.get("ports") or ()
        if each.get("name", "") == port.get("name", "")
        for address in subset.get("addresses") or ()
    ]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            if writer.can_write_eof():
                writer.write_eof()
