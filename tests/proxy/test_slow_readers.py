"""Streams whose clients do not read: they delay nobody, and what they hold is bounded.

`python -m benchmarks.slow_readers` does it with 1,000 of them and real processes.
"""

import asyncio
from itertools import count

from tests.proxy.builders import ids, stack, until
from tests.proxy.mock_engines import Call, MockEngine
from tests.proxy.test_cancellation import RawClient

NUM_SLOW = 4
NUM_FAST = 4
NUM_TOKENS = 20
LIMIT_BYTES = 20_000
SLOW_PROMPT = "slow"


async def long_for_the_slow(call: Call) -> None:
    """They get 4 KB a step, which nobody reads, the others a token."""
    await call.accept()
    if call.completion_request.prompt_token_ids == tuple(ids(SLOW_PROMPT)):
        for step in count():
            await call.tokens(step * 4096, ids("s") * 4096)
            await asyncio.sleep(0.002)
    for index in range(NUM_TOKENS):
        reason = "length" if index == NUM_TOKENS - 1 else None
        await call.tokens(index, ids("f"), finish_reason=reason)
        await asyncio.sleep(0.002)


async def test_streams_that_are_not_read_delay_no_other_and_are_given_up_at_their_limit() -> None:
    engine = MockEngine("normal", long_for_the_slow, has_link=True)
    async with stack(engine, client_backlog_bytes=LIMIT_BYTES) as running:
        slow = [await RawClient.connect(running, reads_ahead=False) for _ in range(NUM_SLOW)]
        for client in slow:
            client.post(prompt=SLOW_PROMPT, stream=True)
        await until(lambda: len(engine.calls) == NUM_SLOW)
        fast = [running.complete(prompt="fast", stream=True, max_tokens=NUM_TOKENS) for _ in range(NUM_FAST)]
        async with asyncio.timeout(20):
            for answer in await asyncio.gather(*fast):
                assert answer.text.count('"text":"f"') == NUM_TOKENS
        await until(lambda: running.services.draining.num_open_requests == 0, within_s=30)
        await until(lambda: all(call.client_left.is_set() for call in engine.calls[:NUM_SLOW]))
        running.services.calls.check_invariants()
        for client in slow:
            await client.leave()
