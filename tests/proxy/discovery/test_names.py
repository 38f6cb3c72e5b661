"""Engines behind names: every address is one, and a resolver that fails takes none away."""

import asyncio
import socket
from collections.abc import Sequence

from proxy.discovery.endpoints import Endpoint
from proxy.discovery.names import NameWatcher, resolve_name
from wire.services import EngineRole

Answer = list[str] | Exception


async def placed(*rounds: Answer, url: str = "http://prompts:7001") -> list[list[str]]:
    """The URLs of prompt engines after every round of answers."""
    answers = list(rounds)
    reports: list[list[str]] = []
    done = asyncio.Event()

    async def resolve(host: str, port: int) -> Sequence[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def place(role: EngineRole, endpoints: Sequence[Endpoint]) -> None:
        reports.append([endpoint.url for endpoint in endpoints])
        if not answers:
            done.set()

    watcher = NameWatcher({"prompt": (url,)}, place, refresh_s=0.001, resolve=resolve)
    task = asyncio.create_task(watcher.run())
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return reports[: len(rounds)]


async def test_every_address_of_a_name_is_an_engine() -> None:
    found = await placed(["10.0.0.2", "10.0.0.1", "fd00::1"], ["10.0.0.2"])
    assert found[0] == ["http://10.0.0.1:7001", "http://10.0.0.2:7001", "http://[fd00::1]:7001"]
    assert found[1] == ["http://10.0.0.2:7001"]


async def test_a_resolver_that_fails_takes_no_engine_away() -> None:
    again = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert await placed(["10.0.0.1"], again, OSError("no route")) == [["http://10.0.0.1:7001"]] * 3


async def test_a_name_without_an_address_has_no_engine() -> None:
    gone = socket.gaierror(socket.EAI_NONAME, "not known")
    assert await placed(["10.0.0.1"], gone) == [["http://10.0.0.1:7001"], []]


async def test_an_address_is_its_own_name() -> None:
    assert await resolve_name("127.0.0.1", 7001) == ["127.0.0.1"]
