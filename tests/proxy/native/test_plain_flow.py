"""Streams through a whole proxy, with the compiled path and without: clients cannot tell."""

import asyncio
from dataclasses import dataclass
from functools import partial

import pytest

from proxy import token_link
from proxy.linked_leg import LinkedLeg
from proxy.native import loading
from tests.proxy.builders import Answering, Stack, ids, pair_stack, stack, text_body, until
from tests.proxy.mock_engines import Call, MockEngine

pytestmark = pytest.mark.skipif(not loading.IS_COMPILED, reason=f"nothing compiled: {loading.REASON}")

TEXT = 'Grüße 🙂 שלום\n\t"quoted" \\ and 漢字 ' * 3


@dataclass(slots=True)
class Spy:
    num_begun: int = 0
    """Times that a compiled stream took over."""
    num_asked: int = 0
    """Times that one might have."""

    async def token_by_token(self, call: Call, text: str) -> None:
        """From token 1 on; the next one is sent when it is settled who takes it."""
        token_ids = ids(text)
        await call.accept()
        for index in range(1, len(token_ids)):
            num_asked = self.num_asked
            reason = "length" if index == len(token_ids) - 1 else None
            await call.tokens(index, token_ids[index : index + 1], finish_reason=reason)
            if self.num_begun == 0 and token_link.IS_COMPILED:
                await until(lambda num=num_asked: self.num_asked > num)
        await call.end()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, begin = Spy(), LinkedLeg.begin_plain

    def begin_plain(leg: LinkedLeg) -> None:
        was_plain = leg._plain is not None
        begin(leg)
        seen.num_asked += 1
        seen.num_begun += leg._plain is not None and not was_plain

    monkeypatch.setattr(LinkedLeg, "begin_plain", begin_plain)
    return seen


async def answer_of(running: Stack, path: str, *, is_streamed: bool, **fields: object) -> str:
    """All that depends on tokens."""
    send = running.chat if path == "chat" else running.complete
    response = await send(stream=is_streamed, **fields)
    assert response.status_code == 200
    own = response.headers["x-request-id"]
    return response.text.replace(own, "ID")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("path", ["chat", "text"])
async def test_answers_are_the_same(
    path: str, is_streamed: bool, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.0)
    answers = []
    for is_compiled in (True, False):
        monkeypatch.setattr("proxy.token_link.IS_COMPILED", is_compiled)
        answering = Answering(TEXT, finish_reason="length", num_cached_tokens=1)
        completion = partial(spy.token_by_token, text=TEXT)
        async with pair_stack(answering.prompt, completion) as running:
            answers.append(await answer_of(running, path, is_streamed=is_streamed))
            assert running.metric("tandem_proxy_tokens_total", kind="completion") == len(answering.ids)
        assert spy.num_begun == 1, "all behind the first tokens is plain, and only where it is compiled"
    assert answers[0] == answers[1]
    assert is_streamed or "漢字" in answers[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["zzz"]},
        {"logprobs": 0},
        {"stream_options": {"continuous_usage_stats": True, "include_usage": True}},
        {"n": 2},
    ],
)
async def test_what_needs_more_than_text_is_not_plain(fields: dict[str, object], spy: Spy) -> None:
    async def normal(call: Call) -> None:
        await call.accept()
        for choice in range(call.completion_request.num_completions):
            for index, token_id in enumerate(ids("abcd")):
                reason = "length" if index == 3 else None
                await call.tokens(index, [token_id], finish_reason=reason, choice=choice)
        await call.end()

    async with stack(MockEngine("normal", normal)) as running:
        response = await running.complete(stream=True, **fields)
    assert response.status_code == 200
    assert spy.num_begun == 0


async def test_gaps_between_tokens_are_counted_and_shown(spy: Spy) -> None:
    answering = Answering("abcdefgh", finish_reason="length")
    async with pair_stack(answering.prompt, partial(spy.token_by_token, text="abcdefgh")) as running:
        await running.complete(stream=True)
        num_gaps = running.metric("tandem_proxy_inter_token_seconds_count")
        shown = sum(bucket.num_tokens for bucket in running.services.activity._buckets)
    assert (num_gaps, shown, spy.num_begun) == (7, 8, 1)


async def test_a_client_that_leaves_while_its_stream_is_plain_ends_it_at_the_engine(spy: Spy) -> None:
    async def endless(call: Call) -> None:
        await call.accept()
        index = 1
        while True:
            await call.tokens(index, ids("a"))
            index += 1
            await asyncio.sleep(0)

    async with pair_stack(Answering("a" * 9).prompt, endless) as running:
        body = text_body(stream=True, max_tokens=200)
        request = running.client.build_request("POST", "/v1/completions", json=body)
        response = await running.client.send(request, stream=True)
        lines = response.aiter_lines()
        for _ in range(20):
            await anext(lines)
        assert spy.num_begun == 1
        await response.aclose()
        async with asyncio.timeout(5.0):
            await (await running.engines[1].call()).client_left.wait()
        await until(lambda: running.metric("tandem_proxy_open_requests", stream="true") == 0)
        running.services.calls.check_invariants()
