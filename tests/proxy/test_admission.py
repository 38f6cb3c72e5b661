"""Who may begin: a queue by priority, a deadline for first tokens, limits by key, a deadline for requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from proxy.admission import Admission, AdmissionLimits, Admitted
from proxy.errors import Overloaded
from proxy.key_limits import KeyLimits, KeyUse
from tests.proxy.builders import Answering, events, pair_stack, text_body, until
from tests.proxy.mock_engines import Call


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def queue(clock: Clock | None = None, **limits: object) -> Admission:
    return Admission(AdmissionLimits(**limits), clock or Clock())  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def begun(admission: Admission, num_tokens: int, priority: int = 0) -> AsyncIterator[Admitted]:
    place = admission.enter(num_tokens, priority)
    try:
        async with asyncio.timeout(4):
            await place.turn()
        yield place
    finally:
        place.end(is_computed=False)


async def observed(clock: Clock, admission: Admission, num_tokens: int, seconds: float) -> None:
    """A prompt that took so long."""
    async with begun(admission, num_tokens) as place:
        clock.now_s += seconds
        place.end(is_computed=True)


async def test_without_limits_everything_begins_at_once() -> None:
    admission = queue()
    async with contextlib.AsyncExitStack() as open_requests:
        for _ in range(100):
            place = await open_requests.enter_async_context(begun(admission, 1000))
            assert not place.has_waited
        assert admission.num_tokens_under_way == 100_000
    admission.check_invariants()


async def test_higher_priorities_begin_first_and_equals_in_order_of_arrival() -> None:
    admission, order = queue(max_tokens_under_way=10), list[str]()

    async def ask(name: str, priority: int) -> None:
        async with begun(admission, 10, priority) as place:
            order.append(name)
            assert place.has_waited
            place.end(is_computed=True)

    async with begun(admission, 10):
        asking = []
        for name, priority in (("low", 0), ("high", 5), ("low too", 0), ("highest", 9)):
            asking.append(asyncio.create_task(ask(name, priority)))
            await asyncio.sleep(0)
        assert order == []
        assert admission.num_waiting == 4
    await asyncio.gather(*asking)
    assert order == ["highest", "high", "low", "low too"]
    admission.check_invariants()


async def test_a_first_token_makes_room_before_the_request_has_ended() -> None:
    admission = queue(max_tokens_under_way=10)
    async with begun(admission, 10) as first:
        first.end(is_computed=True)
        async with begun(admission, 10) as second:
            assert not second.has_waited
    admission.check_invariants()


async def test_a_prompt_over_the_limit_runs_alone() -> None:
    async with begun(queue(max_tokens_under_way=10), 1000) as place:
        assert not place.has_waited


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_the_queue_leaves_nothing_behind(has_begun: bool) -> None:
    admission = queue(max_tokens_under_way=10)

    async def ask() -> None:
        async with begun(admission, 10):
            await asyncio.Event().wait()

    async with begun(admission, 10) as first:
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        if has_begun:
            first.end(is_computed=True)  # lets it in, and it is cancelled before it knows
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    admission.check_invariants()


async def test_a_place_is_not_given_to_a_client_that_is_just_leaving_the_queue() -> None:
    admission = queue(max_tokens_under_way=10)

    async def ask() -> None:
        async with begun(admission, 10):
            await asyncio.Event().wait()

    async with begun(admission, 10) as first:
        leaving, staying = asyncio.create_task(ask()), asyncio.create_task(ask())
        await asyncio.sleep(0)
        leaving.cancel()
        first.end(is_computed=True)
        await asyncio.gather(leaving, return_exceptions=True)
        assert (admission.num_waiting, admission.num_tokens_under_way) == (0, 10)
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
    admission.check_invariants()


async def test_a_first_token_after_the_limit_is_refused_with_the_time_to_come_back() -> None:
    clock = Clock()
    admission = queue(clock, first_token_s=2.0)
    await observed(clock, admission, 1000, 1.0)
    async with begun(admission, 1500):
        assert admission.predicted_s(500, 0) == pytest.approx(2.0, rel=0.05)
        async with begun(admission, 300):
            with pytest.raises(Overloaded) as refused:
                async with begun(admission, 3000):
                    pass
    assert refused.value.reason == "first_token_late"
    assert refused.value.headers["retry-after"] == "3"
    async with begun(admission, 100_000):
        pass  # alone, it is served: nothing gets faster by waiting


async def test_what_is_behind_in_the_queue_delays_nobody_of_a_higher_priority() -> None:
    clock = Clock()
    admission = queue(clock, first_token_s=2.0, max_tokens_under_way=100)
    await observed(clock, admission, 1000, 1.0)
    async with begun(admission, 100):
        low = admission.enter(1800, 0)
        assert admission.predicted_s(500, 0) > 2.0
        assert admission.predicted_s(500, 1) < 1.0
        low.end(is_computed=False)


async def test_a_full_queue_refuses() -> None:
    with pytest.raises(Overloaded, match="0 requests are waiting"):
        async with begun(queue(max_waiting=0), 1):
            pass


def test_a_key_may_burst_and_then_keeps_its_rate_and_others_have_their_own() -> None:
    clock = Clock()
    use = KeyUse(KeyLimits(requests_per_s=0.5, burst=2), clock)

    def refusal(key: str) -> str | None:
        try:
            with use.open(key):
                return None
        except Overloaded as refused:
            return refused.headers["retry-after"]

    assert [refusal("a") for _ in range(3)] == [None, None, "2"]
    assert refusal("b") is None
    clock.now_s = 2.0
    assert [refusal("a") for _ in range(2)] == [None, "2"]


def test_a_key_has_so_many_requests_open() -> None:
    use = KeyUse(KeyLimits(max_open=1), Clock())
    with use.open("a"), use.open("b"), pytest.raises(Overloaded, match="its limit"), use.open("a"):
        pass
    with use.open("a"):
        pass


async def test_a_key_over_its_limit_gets_429_with_retry_after() -> None:
    answering = Answering("ok")
    scripts = (answering.prompt, answering.completion)
    async with pair_stack(*scripts, key_requests_per_s=0.1, key_burst=1) as running:
        assert (await running.complete()).status_code == 200
        response = await running.complete()
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(response.headers["retry-after"]) <= 10
        assert running.metric("tandem_proxy_refusals_total", reason="key_rate") == 1


@pytest.mark.parametrize(
    ("api_keys", "headers"),
    [
        ("k", [("authorization", "bEARER   k")]),
        ("k", [("authorization", "Bearer k"), ("authorization", "Bearer other")]),
        (None, [("authorization", "Bearer made-up")]),
    ],
)
async def test_a_key_has_one_count_however_it_is_written(
    api_keys: str | None, headers: list[tuple[str, str]]
) -> None:
    answering = Answering("ok")
    scripts = (answering.prompt, answering.completion)
    limits = {"key_requests_per_s": 0.1, "key_burst": 1}
    async with pair_stack(*scripts, api_keys=api_keys, **limits) as running:

        async def status(headers: list[tuple[str, str]]) -> int:
            body = text_body()
            return (await running.client.post("/v1/completions", json=body, headers=headers)).status_code

        assert await status([("authorization", "Bearer k")]) == 200
        assert await status(headers) == 429


async def silent(call: Call) -> None:
    await asyncio.Event().wait()


async def accepted(call: Call) -> None:
    await call.accept()
    await silent(call)


async def test_a_request_that_waits_begins_when_the_one_before_it_has_its_first_token() -> None:
    may_answer = asyncio.Event()
    answering = Answering("ok")

    async def prompt(call: Call) -> None:
        await may_answer.wait()
        await answering.prompt(call)

    async with pair_stack(prompt, answering.completion, max_prompt_tokens_under_way=2) as running:
        asking = [asyncio.create_task(running.complete()) for _ in range(3)]
        await until(lambda: running.services.admission.num_waiting == 2)
        await running.engines[0].call()
        assert len(running.engines[0].calls) == 1
        may_answer.set()
        assert {(await task).status_code for task in asking} == {200}
        running.services.admission.check_invariants()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_over_its_deadline_is_ended_and_its_legs_cancelled(is_streamed: bool) -> None:
    async with pair_stack(Answering("ok").prompt, accepted, request_timeout_s=2.0) as running:
        response = await running.complete(stream=is_streamed)
        if is_streamed:
            *_, error, done = events(response.text)
            assert ("request_timeout" in error, done) == (True, "[DONE]")
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        async with asyncio.timeout(4):
            await running.engines[1].calls[0].client_left.wait()


async def test_a_client_may_ask_for_a_shorter_deadline() -> None:
    async with pair_stack(silent, silent, request_timeout_s=60) as running:
        body = {"model": "tiny", "prompt": "hi"}
        for given, status in (("0.1", 504), ("soon", 400), ("-1", 400), ("inf", 400)):
            headers = {"x-request-timeout-s": given}
            response = await running.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status


async def test_token_limits_of_the_operator() -> None:
    answering = Answering("ok")
    limits = {"max_prompt_tokens": 4, "max_completion_tokens": 8}
    async with pair_stack(answering.prompt, answering.completion, **limits) as running:
        assert (await running.complete(prompt="long prompt")).status_code == 400
        assert (await running.complete(max_tokens=9)).json()["error"]["param"] == "max_tokens"
        assert (await running.complete()).status_code == 200
        assert running.engines[0].calls[-1].prompt_request.sampling.max_tokens == 8
