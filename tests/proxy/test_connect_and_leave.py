"""Clients that connect and leave, at any moment of a request: nothing of them stays.

`make leave` does it with 10,000 of them and looks at the memory, too.
"""

import asyncio
import os
import random
from itertools import count

import psutil
import pytest

from tests.proxy.builders import Stack, ids, stack, until
from tests.proxy.mock_engines import Call, MockEngine, token
from tests.proxy.test_cancellation import RawClient
from wire.services import PromptChoice

NUM_CLIENTS = int(os.environ.get("TANDEM_NUM_LEAVING_CLIENTS", "150"))
NUM_AT_ONCE = 50
MAX_GROWTH_BYTES = 32 << 20
"""Of resident memory, between the first tenth of many clients and the last."""


async def first_tokens(call: Call) -> None:
    choices = [PromptChoice(token=token(0, ids("a")[0]))] * call.prompt_request.num_completions
    await call.first_tokens(*choices)


async def endless(call: Call) -> None:
    await call.accept()
    for index in count(1):
        for choice in range(call.completion_request.num_completions):
            await call.tokens(index, ids("b"), choice=choice)
        await asyncio.sleep(0.005)


async def connect_and_leave(running: Stack, chance: random.Random) -> None:
    client = await RawClient.connect(running)
    if chance.random() < 0.9:
        client.post(
            stream=chance.random() < 0.7, n=chance.choice((1, 1, 3)), prompt="x" * chance.randrange(1, 40)
        )
    if chance.random() < 0.5:
        await asyncio.sleep(chance.random() * 0.05)
    await client.leave()


async def leave(running: Stack, num_clients: int) -> None:
    chance, left = random.Random(num_clients), iter(range(num_clients))

    async def some() -> None:
        for _ in left:
            await connect_and_leave(running, chance)
            for engine in running.engines:
                engine.calls.clear()  # they would be most of what is kept

    await asyncio.gather(*(some() for _ in range(NUM_AT_ONCE)))
    services = running.services
    await until(lambda: services.draining.num_open_requests == 0)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("has_link", [False, True])
async def test_clients_that_connect_and_leave_pin_nothing_and_leak_no_descriptor(has_link: bool) -> None:
    engines = [MockEngine("prompt", first_tokens), MockEngine("completion", endless, has_link=has_link)]
    async with stack(*engines, max_migrations=5, connect_timeout_s=60.0) as running:
        services, process = running.services, psutil.Process()
        await leave(running, NUM_CLIENTS // 10)
        await until(lambda: num_idle_tasks() <= 40)
        num_descriptors, num_tasks = process.num_fds(), num_idle_tasks()
        memory_bytes = process.memory_info().rss
        await leave(running, NUM_CLIENTS)
        await until(lambda: num_idle_tasks() <= num_tasks + 5)
        services.calls.check_invariants()
        services.admission.check_invariants()
        (failures,) = services.metrics.leg_failures.collect()
        # On a machine that is busy enough even a connection may time out.
        assert "broken" not in {sample.labels["reason"] for sample in failures.samples}
        # Idle connections to engines are kept, as many as were used at once.
        assert process.num_fds() <= num_descriptors + 4 * NUM_AT_ONCE
        assert process.memory_info().rss - memory_bytes < MAX_GROWTH_BYTES


def num_idle_tasks() -> int:
    return len(asyncio.all_tasks())
