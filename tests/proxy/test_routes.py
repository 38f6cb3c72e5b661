"""Pairing as a client meets it."""

from collections import Counter

from proxy.breaker import CLOSED, MAX_FAILURES, Breaker
from proxy.request_flow import PromptWork
from tests.proxy.builders import Answering, ids, stack
from tests.proxy.mock_engines import MockEngine
from wire.sampling import SamplingParams


def fleet() -> list[MockEngine]:
    answering = Answering("answered", finish_reason="length")
    prompts = [MockEngine("prompt", answering.prompt) for _ in range(2)]
    return [*prompts, *(MockEngine("completion", answering.completion) for _ in range(3))]


async def test_a_chats_next_turn_meets_the_engines_that_have_its_last_one() -> None:
    async with stack(*fleet()) as running:
        for chat in ("one chat: ", "another: ", "a third: "):
            prompt = chat + "x" * 40
            for _ in range(4):
                text = (await running.complete(prompt=prompt)).json()["choices"][0]["text"]
                prompt += text + " and then? "
        calls_by_chat = [
            Counter(call.completion_request.prompt_token_ids[:4] for call in engine.calls)
            for engine in running.engines
        ]
    assert {count for calls in calls_by_chat for count in calls.values()} == {4}, "a chat has changed engines"


async def test_a_session_keeps_its_engines_under_the_session_policy() -> None:
    async with stack(*fleet(), prompt_policy="session", completion_policy="session") as running:
        for number in range(6):
            headers = {"x-session-id": "me"}
            body = {"model": "tiny", "prompt": f"{number}"}
            await running.client.post("/v1/completions", json=body, headers=headers)
        assert sorted(len(engine.calls) for engine in running.engines) == [0, 0, 0, 6, 6]


async def test_nothing_is_counted_as_queued_once_all_is_answered() -> None:
    async with stack(*fleet()) as running:
        for number in range(6):
            await running.complete(prompt=f"prompt {number}", n=1)
        running.services.calls.loads.check_invariants()


async def test_a_request_that_is_refused_is_no_trial_and_leaves_no_prefix() -> None:
    answering = Answering("answered")
    engines = MockEngine("prompt", answering.prompt), MockEngine("completion", answering.completion)
    async with stack(*engines) as running:
        directory, prompt = running.services.directory, "x" * 100
        watched = directory._watched["prompt", running.engines[0].url]
        watched.breaker = Breaker(num_failures=MAX_FAILURES, open_until_s=0.0)
        directory._notify()
        refused = await running.complete(prompt=prompt, max_tokens=10**6)
        assert refused.status_code == 400
        assert watched.breaker.trial_until_s == 0.0
        routes = running.services.routes
        assert not any(routes._cached(routes.snapshot(), ids(prompt)).values())
        assert (await running.complete(prompt=prompt)).status_code == 200
        assert watched.breaker is CLOSED
        assert all(routes._cached(routes.snapshot(), ids(prompt)).values())


async def test_short_prompts_and_those_a_normal_engine_has_mostly_cached_need_no_pair() -> None:
    answering = Answering("answered", finish_reason="length")
    engines = (*fleet(), MockEngine("normal", answering.normal))
    async with stack(*engines, normal_max_new_tokens=20) as running:
        long = "a long prompt " * 3
        routes = [
            (await running.complete(prompt=prompt)).headers["x-tandem-route"]
            for prompt in ("short", long, long[:20], long[:36], long, "another long prompt of many tokens")
        ]
        kinds = {kind: running.metric("tandem_proxy_routes_total", kind=kind) for kind in ("pair", "normal")}
    assert routes == ["normal", "pair", "normal", "normal", "normal", "pair"]
    assert kinds == {"pair": 2, "normal": 4}


async def test_a_session_keeps_its_engines_when_its_request_is_routed_again() -> None:
    prompt = tuple(ids("hello"))
    sampling = SamplingParams(max_tokens=4)
    async with stack(*fleet(), prompt_policy="session", completion_policy="session") as running:
        routes = running.services.routes
        for session in ("me", "you", "them", "us"):
            first = routes.first(prompt, 10, session)
            work = PromptWork(
                request_id="r",
                handover_id="h",
                prompt_token_ids=prompt,
                sampling=sampling,
                num_completions=1,
                session=session,
            )
            assert first is not None
            for _ in range(3):
                again = routes.any(work)
                assert again is not None
                assert again.engines == first.engines
