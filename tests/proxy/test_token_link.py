"""Links that cannot be opened."""

import asyncio
from typing import Any, NoReturn

import pytest

from proxy.engine_waits import EngineWaits
from proxy.engines import Engine
from proxy.errors import EngineUnreachable
from proxy.token_link import TokenLinks
from settings.secret_keys import SecretKeys
from tests.proxy.builders import until
from tests.proxy.mock_engines import MockEngine
from wire.sampling import SamplingParams
from wire.services import CompletionRequest

INFO = MockEngine("completion", lambda call: asyncio.sleep(0), has_link=True).info
ENGINE = Engine(url="http://a", role="completion", info=INFO, is_ready=True, problem="")
REQUEST = CompletionRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Connecting takes for ever; one entry each."""
    begun: list[None] = []

    async def create_connection(*args: Any, **options: Any) -> NoReturn:
        begun.append(None)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)
    return begun


async def test_streams_share_one_attempt_to_connect_and_its_failure(attempts: list[None]) -> None:
    waits = EngineWaits()
    links = TokenLinks(waits, SecretKeys(), connect_timeout_s=0.2)
    async with asyncio.timeout(1.0):
        failures = await asyncio.gather(
            *(links.open(ENGINE, REQUEST) for _ in range(20)), return_exceptions=True
        )
    assert {type(failure) for failure in failures} == {EngineUnreachable}
    assert len({id(failure) for failure in failures}) == 20, "each client's failure gets headers of its own"
    assert (len(attempts), waits.num_waits) == (1, 0)


async def test_who_waits_for_a_link_is_freed_when_the_engine_is_given_up(attempts: list[None]) -> None:
    waits = EngineWaits()
    links = TokenLinks(waits, SecretKeys(), connect_timeout_s=60.0)
    opening = [asyncio.create_task(links.open(ENGINE, REQUEST)) for _ in range(2)]
    await until(lambda: bool(attempts))
    waits.give_up(ENGINE)
    async with asyncio.timeout(1.0):
        failures = await asyncio.gather(*opening, return_exceptions=True)
    assert {type(failure) for failure in failures} == {EngineUnreachable}
    links.close()
