"""The web page's files and the JSON behind it; `tests/browser` looks at the page itself."""

import asyncio

from proxy.activity import NUM_BUCKETS, NUM_TRACES, Activity, quantile
from proxy.fleet import Engine
from proxy.page.routes import FILES
from proxy.pairing import Pair, Single
from tests.proxy.builders import Answering, ids, pair_stack
from tests.proxy.mock_engines import Call

PAIR = Pair(Engine(url="http://p", role="prompt"), Engine(url="http://d", role="completion"))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_the_files_are_served_and_may_load_nothing_from_elsewhere() -> None:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        for path, (_, media_type) in FILES.items():
            response = await running.client.get(path)
            assert (response.status_code, response.headers["content-type"]) == (200, media_type)
            assert "default-src 'self'" in response.headers["content-security-policy"]
            assert "://" not in response.text.replace("http://www.w3.org/2000/svg", "")


async def test_the_status_shows_a_handover_while_it_is_in_flight() -> None:
    go_on = asyncio.Event()

    async def completion(call: Call) -> None:
        await call.accept()
        await go_on.wait()
        await call.tokens(1, ids("b"), finish_reason="length")
        await call.end()

    async with pair_stack(Answering("a", finish_reason=None).prompt, completion) as running:
        headers = {"x-request-id": "mine"}
        body = {"model": "tiny", "prompt": "hi", "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.aiter_lines()
            await anext(lines)
            moving = (await running.client.get("/page/status")).json()
            half_way = (await running.client.get("/page/requests/mine")).json()
            go_on.set()
            async for _ in lines:
                pass
        done = (await running.client.get("/page/requests/mine")).json()
        still = (await running.client.get("/page/status")).json()
        unknown = (await running.client.get("/page/requests/nobody")).json()
    assert moving["handovers"] == [{"from": "prompt 1", "to": "completion 1", "count": 1}]
    assert [engine["num_prompts"] for engine in moving["engines"]] == [1, 1]
    assert (half_way["state"], half_way["kv_arrived_s"]) == ("hand-over", None)
    assert done["engines"] == ["prompt 1", "completion 1"]
    assert 0 < done["first_token_s"] < done["kv_arrived_s"] <= done["ended_s"]
    assert (still["handovers"], still["num_open_requests"]) == ([], 0)
    assert len(still["history"]) == NUM_BUCKETS - 1
    assert unknown == {"state": "unknown"}
    running.services.activity.check_invariants()


def test_buckets_are_the_last_minutes_without_the_one_that_is_not_over() -> None:
    clock = Clock()
    activity = Activity(clock, bucket_s=5.0)
    activity.first_token(0.5, clock.now_s)
    activity.next_token(0.1, clock.now_s)
    assert not any(bucket.num_tokens for bucket in activity.buckets())
    clock.now_s += 5
    assert (activity.buckets()[-1].first_token_s, activity.buckets()[-1].num_tokens) == ([0.5], 2)
    clock.now_s += 5 * NUM_BUCKETS
    assert not any(bucket.num_tokens for bucket in activity.buckets())


def test_first_tokens_of_other_choices_are_no_arrival() -> None:
    activity = Activity(Clock())
    trace = activity.trace("r", PAIR, started_s=0.0)
    for now_s, is_first in ((1.0, True), (1.5, True), (2.0, False), (3.0, False)):
        trace.token(now_s, is_first_of_choice=is_first)
    assert (trace.first_token_s, trace.arrived_s) == (1.0, 2.0)
    alone = activity.trace("r", Single(Engine(url="http://n", role="normal")), started_s=0.0)
    for is_first in (True, False):
        alone.token(1.0, is_first_of_choice=is_first)
    assert (alone.arrived_s, alone.state) == (None, "completion")


def test_only_the_last_ended_prompts_are_kept() -> None:
    activity = Activity(Clock())
    for number in range(NUM_TRACES + 5):
        trace = activity.trace(str(number), PAIR, 0.0)
        activity.begin(trace)
        assert activity.find(str(number)) is trace
        activity.end(trace)
    assert activity.find("4") is None
    assert activity.find("5") is not None
    activity.check_invariants()


def test_quantiles_are_samples() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.95) == 2.0
