"""Engines fail under a stream: it goes on elsewhere, and its client sees one undisturbed answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from tests.proxy.builders import END_ID, Stack, events, ids, stack, until
from tests.proxy.mock_engines import Call, MockEngine, Script, token
from wire.services import CompletionEvent, FinishReason, PromptChoice, ServiceError, TokenLogprobs

TEXT = "Grüße 🙂 שלום und mehr"
TOKENS = [*ids(TEXT), END_ID]
PROMPT = tuple(ids("hi"))
BOTH_WAYS = pytest.mark.parametrize("is_streamed", [False, True])

Fault = Callable[[Call], Awaitable[None]]


def logprobs_of(index: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-0.25 * index)


class Generating:
    """Scripts of engines that generate TOKENS, whatever part of them a request brings along.

    `faults`: what a completion (or NORMAL) leg does instead of generating this output index, once each.
    """

    def __init__(self, faults: dict[int, Fault] | None = None) -> None:
        self.faults = dict(faults or {})
        self.num_generated = 0

    def start(self, call: Call) -> int:
        """The index the request wants next; what it replays must be what was generated."""
        request = call.completion_request
        num_replayed = request.num_replayed_tokens
        assert list(request.prompt_token_ids) == [*PROMPT, *TOKENS[:num_replayed]]
        assert request.num_completions == 1
        return num_replayed

    async def prompt(self, call: Call) -> None:
        index = self.start(call)
        self.num_generated += 1
        first = token(index, TOKENS[index], logprobs_of(index))
        await call.first_tokens(
            PromptChoice(token=first, finish_reason=_end(index)), num_cached_tokens=len(PROMPT) - 1 + index
        )

    async def completion(self, call: Call) -> None:
        await self._stream(call, self.start(call) + 1)

    async def normal(self, call: Call) -> None:
        await self._stream(call, self.start(call))

    async def _stream(self, call: Call, first_index: int) -> None:
        await call.accept()
        for index in range(first_index, len(TOKENS)):
            fault = self.faults.pop(index, None)
            if fault is not None:
                await fault(call)
                return
            self.num_generated += 1
            wants_logprobs = call.completion_request.sampling.logprobs is not None
            made = token(index, TOKENS[index], logprobs_of(index) if wants_logprobs else None)
            await call.event(CompletionEvent(tokens=(made,), finish_reason=_end(index)))
        await call.end()


def _end(index: int) -> FinishReason | None:
    return "stop" if index == len(TOKENS) - 1 else None


async def breaks(call: Call) -> None:
    raise ConnectionAbortedError


async def ends_early(call: Call) -> None:
    await call.end()


async def loses_its_engine(call: Call) -> None:
    error = ServiceError(message="the engine died", type="service_unavailable", code="engine_lost")
    await call.event(CompletionEvent(error=error, error_status=503))
    await call.end()


async def loses_its_peer(call: Call) -> None:
    error = ServiceError(message="gone", type="server_error", code="handover_peer_lost")
    await call.event(CompletionEvent(error=error, error_status=503))
    await call.end()


async def has_no_room(call: Call) -> None:
    await call.event(CompletionEvent(finish_reason="insufficient_system_resource"))
    await call.end()


async def has_no_room_for_arrivals(call: Call) -> None:
    error = ServiceError(message="full", type="server_error", code="handover_no_room")
    await call.event(CompletionEvent(error=error, error_status=503))
    await call.end()


async def skips_a_token(call: Call) -> None:
    await call.tokens(1000, ids("x"))
    await asyncio.Event().wait()


async def stalls(call: Call) -> None:
    await asyncio.Event().wait()


FAULTS = {
    "breaks": (breaks, "broken"),
    "ends early": (ends_early, "broken"),
    "engine lost": (loses_its_engine, "refused"),
    "peer lost": (loses_its_peer, "handover"),
    "no room": (has_no_room, "out_of_room"),
    "no room for arrivals": (has_no_room_for_arrivals, "out_of_room"),
    "skips": (skips_a_token, "broken"),
    "stalls": (stalls, "timeout"),
}


def two_pairs(
    scripts: Generating, *, has_link: bool = True, **settings: object
) -> AbstractAsyncContextManager[Stack]:
    engines = [MockEngine("prompt", scripts.prompt) for _ in range(2)]
    engines += [MockEngine("completion", scripts.completion, has_link=has_link) for _ in range(2)]
    return stack(
        *engines, **{"max_migrations": 5, "stall_timeout_s": 10.0, "first_byte_timeout_s": 10.0, **settings}
    )


def whole(chunks: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Text and finish reasons of a streamed text completion."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    return "".join(choice["text"] for choice in choices), reasons


async def streamed(running: Stack, **fields: object) -> list[dict[str, Any]]:
    response = await running.complete(stream=True, **fields)
    assert response.status_code == 200
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    decoded = [json.loads(chunk) for chunk in chunks]
    assert not any("error" in chunk for chunk in decoded), decoded[-1]
    return decoded


@pytest.mark.parametrize(
    ("name", "has_link"),
    # A stream of a link has no end of its own that could come early.
    [
        (name, has_link)
        for name in FAULTS
        for has_link in (False, True)
        if not (has_link and name == "ends early")
    ],
)
@pytest.mark.parametrize("index", [1, 7, len(TOKENS) - 1])
async def test_a_stream_goes_on_elsewhere_with_the_same_text_usage_and_end(
    name: str, index: int, has_link: bool
) -> None:
    fault, reason = FAULTS[name]
    scripts = Generating({index: fault})
    patience = {"stall_timeout_s": 2.0, "first_byte_timeout_s": 4.0} if name == "stalls" else {}
    async with two_pairs(scripts, has_link=has_link, **patience) as running:
        chunks = await streamed(running, stream_options={"include_usage": True})
        *chunks, usage = chunks
        assert whole(chunks) == (TEXT, ["stop"])
        assert usage["usage"]["prompt_tokens"] == len(PROMPT)
        assert usage["usage"]["completion_tokens"] == len(TOKENS)
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
        stages = [
            running.metric("tandem_proxy_migrations_total", reason=reason, stage=stage)
            for stage in ("stream", "retry", "handover")
        ]
        # A completion leg that fails at once may do so before token 0 is out, which is then drawn again, or
        # leave the hand-over to the other completion engine.
        assert stages == [1, 0, 0] or (index == 1 and sum(stages) == 1)
        num_again = int(stages[1])
        if name != "skips":  # what such an engine sent together with the gap is not believed either
            assert scripts.num_generated == len(TOKENS) + num_again, "something was generated twice"


async def test_an_unstreamed_answer_says_how_often_it_was_migrated() -> None:
    async with two_pairs(Generating({3: breaks, 9: has_no_room})) as running:
        response = await running.complete()
        assert response.headers["x-tandem-migrations"] == "2"
        assert response.json()["choices"][0]["text"] == TEXT
        assert (await running.complete()).headers["x-tandem-migrations"] == "0"


async def test_the_engine_that_failed_is_avoided_and_the_other_prompt_engine_may_serve() -> None:
    scripts = Generating({5: breaks})
    async with two_pairs(scripts) as running:
        await streamed(running)
        _, _, first, second = running.engines
        assert sorted((len(first.calls), len(second.calls))) == [1, 1]


async def test_the_page_is_told_where_a_stream_has_gone() -> None:
    async with two_pairs(Generating({5: breaks})) as running:
        response = await running.complete()
        trace = running.services.activity.find(response.headers["x-request-id"])
        (last,) = (
            engine.url
            for engine in running.engines[2:]
            if any(call.completion_request.num_replayed_tokens for call in engine.calls)
        )
    assert trace is not None
    assert (trace.engine_urls[-1], trace.num_migrations) == (last, 1)


async def test_every_attempt_has_names_of_its_own() -> None:
    async with two_pairs(Generating({2: breaks, 5: breaks, 8: loses_its_peer})) as running:
        await streamed(running)
        calls = [call.prompt_request for engine in running.engines[:2] for call in engine.calls]
        assert len({call.request_id for call in calls}) == len({call.handover_id for call in calls}) == 4


async def test_logprobs_are_those_of_an_undisturbed_run() -> None:
    async with two_pairs(Generating({4: breaks, 11: breaks})) as running:
        response = (await running.complete(logprobs=0)).json()
    logprobs = response["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs == [-0.25 * index for index in range(len(TOKENS) - 1)]


async def test_a_stop_string_is_found_across_a_migration() -> None:
    stop = "שלום"
    inside = TEXT.encode().index(stop.encode()) + 3
    async with two_pairs(Generating({inside: breaks})) as running:
        response = (await running.complete(stop=[stop])).json()
    assert response["choices"][0]["text"] == TEXT[: TEXT.index(stop)]
    assert response["choices"][0]["finish_reason"] == "stop"


async def test_a_normal_engines_stream_goes_on_at_another_one() -> None:
    scripts = Generating({6: breaks, 9: loses_its_engine})
    engines = [MockEngine("normal", scripts.normal) for _ in range(3)]
    async with stack(*engines, max_migrations=5) as running:
        assert whole(await streamed(running)) == (TEXT, ["stop"])
        assert scripts.num_generated == len(TOKENS)


async def test_a_pairs_stream_may_go_on_at_a_normal_engine() -> None:
    scripts = Generating({6: breaks})
    engines = [
        MockEngine("prompt", scripts.prompt),
        MockEngine("completion", scripts.completion),
        MockEngine("normal", scripts.normal),
    ]
    async with stack(*engines, max_migrations=5) as running:
        assert whole(await streamed(running)) == (TEXT, ["stop"])


async def test_each_unfinished_choice_goes_on_with_its_own_seed_and_finished_ones_are_left() -> None:
    texts = {0: "abc", 1: "d", 2: "efgh"}
    seen: list[tuple[int, int]] = []

    async def prompt(call: Call) -> None:
        request = call.completion_request
        if request.num_completions == 3:
            seeds.extend(request.sampling.of_choice(choice).seed for choice in range(3))
            await call.first_tokens(
                *(
                    PromptChoice(
                        token=token(0, ids(text)[0]), finish_reason="length" if text == "d" else None
                    )
                    for text in texts.values()
                )
            )
            return
        choice, index = seeds.index(request.sampling.seed), request.num_replayed_tokens
        seen.append((choice, index))
        text = texts[choice]
        await call.first_tokens(
            PromptChoice(
                token=token(index, ids(text)[index]),
                finish_reason="length" if index == len(text) - 1 else None,
            )
        )

    async def completion(call: Call) -> None:
        await call.accept()
        request = call.completion_request
        if request.num_completions == 3:
            await call.tokens(1, ids("b"), choice=0)
            await call.tokens(1, ids("fg"), choice=2)
            await breaks(call)
        text = texts[seeds.index(request.sampling.seed)]
        await call.tokens(
            request.num_replayed_tokens + 1,
            ids(text)[request.num_replayed_tokens + 1 :],
            finish_reason="length",
        )
        await call.end()

    seeds: list[int] = []
    engines = [MockEngine("prompt", prompt), *(MockEngine("completion", completion) for _ in range(2))]
    async with stack(*engines, max_migrations=5) as running:
        response = await running.complete(n=3, max_tokens=4)
        choices = response.json()["choices"]
    assert [choice["text"] for choice in choices] == list(texts.values())
    assert sorted(seen) == [(0, 2), (2, 3)]
    assert response.headers["x-tandem-migrations"] == "2"


async def refuses(call: Call) -> None:
    await call.refuse(503, "loading", code="engine_loading")


@BOTH_WAYS
@pytest.mark.parametrize("fault", [refuses, breaks])
async def test_a_prompt_that_fails_before_its_first_token_is_tried_on_a_fresh_pair(
    fault: Script, is_streamed: bool
) -> None:
    good = Generating()
    faulty = MockEngine("prompt", fault)
    engines = [faulty, MockEngine("prompt", good.prompt), MockEngine("completion", good.completion)]
    async with stack(*engines, max_migrations=5) as running:
        for _ in range(4):
            response = await running.complete(stream=is_streamed)
            assert response.status_code == 200
            assert "error" not in response.text
        assert faulty.calls
        retries = sum(
            running.metric("tandem_proxy_migrations_total", reason=reason, stage="retry")
            for reason in ("refused", "broken", "unreachable")
        )
        assert retries == len(faulty.calls)


async def test_before_the_first_token_without_another_pair_the_failure_is_the_clients_at_once() -> None:
    engines = [MockEngine("prompt", refuses), MockEngine("completion", stalls_accepted)]
    async with stack(*engines, max_migrations=5, migration_wait_s=60) as running:
        async with asyncio.timeout(4):
            response = await running.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_loading")
        assert len(running.engines[0].calls) == 1


async def stalls_accepted(call: Call) -> None:
    await call.accept()
    await stalls(call)


async def test_a_request_the_engine_blames_is_never_tried_again() -> None:
    async def refuse(call: Call) -> None:
        await call.refuse(400, "no", kind="invalid_request_error")

    engines = [*(MockEngine("prompt", refuse) for _ in range(3)), MockEngine("completion", stalls_accepted)]
    async with stack(*engines, max_migrations=5) as running:
        assert (await running.complete()).status_code == 400
        assert sum(len(engine.calls) for engine in running.engines[:3]) == 1


async def test_a_request_that_breaks_every_engine_ends_at_the_limit_with_one_error() -> None:
    scripts = Generating()

    async def completion(call: Call) -> None:
        await call.accept()
        await breaks(call)

    engines = [MockEngine("prompt", scripts.prompt)]
    engines += [MockEngine("completion", completion) for _ in range(9)]
    async with stack(*engines, max_migrations=3, migration_wait_s=60) as running:
        response = await running.complete(stream=True)
        *_, error, done = events(response.text)
        assert (json.loads(error)["error"]["code"], done) == ("engine_failed", "[DONE]")
        assert sum(len(engine.calls) for engine in running.engines[1:]) == 4


async def test_a_broken_stream_waits_for_the_only_pair_to_come_back() -> None:
    scripts = Generating({5: loses_its_engine})
    engines = [MockEngine("prompt", scripts.prompt), MockEngine("completion", scripts.completion)]

    async with stack(*engines, max_migrations=5, refresh_s=0.02) as running:
        completion = running.engines[1]

        async def loses_and_restarts(call: Call) -> None:
            completion.is_ready = False
            await loses_its_engine(call)

        scripts.faults[5] = loses_and_restarts
        streaming = asyncio.create_task(streamed(running))
        async with asyncio.timeout(5):
            while running.services.directory.snapshot().engines[1].is_ready:
                await running.services.directory.wait_for_change()
        completion.is_ready = True
        assert whole(await streaming) == (TEXT, ["stop"])


@pytest.mark.parametrize("has_link", [False, True])
async def test_a_broken_stream_waits_for_the_only_normal_engine_to_come_back(has_link: bool) -> None:
    scripts = Generating()
    normal = MockEngine("normal", scripts.normal, has_link=has_link)

    async def loses_and_restarts(call: Call) -> None:
        normal.is_ready = False
        await loses_its_engine(call)

    scripts.faults[5] = loses_and_restarts
    async with stack(normal, max_migrations=5, refresh_s=0.02) as running:
        directory = running.services.directory
        streaming = asyncio.create_task(streamed(running))
        async with asyncio.timeout(5):
            while directory.snapshot().engines[0].is_ready:
                await directory.wait_for_change()
        normal.info = replace(normal.info, epoch=2)
        normal.is_ready = True
        assert whole(await streaming) == (TEXT, ["stop"])


async def test_a_broken_stream_without_engines_ends_with_an_error_at_its_deadline() -> None:
    scripts = Generating()
    engines = [MockEngine("prompt", scripts.prompt), MockEngine("completion", scripts.completion)]
    async with stack(*engines, max_migrations=5, refresh_s=0.02, migration_wait_s=0.5) as running:
        completion = running.engines[1]

        async def loses_for_good(call: Call) -> None:
            completion.is_ready = False
            completion.script = loses_its_engine  # should the stream come back before a probe has told
            await loses_its_engine(call)

        scripts.faults[5] = loses_for_good
        response = await running.complete(stream=True)
        *_, error, done = events(response.text)
        assert (json.loads(error)["error"]["code"], done) == ("engine_lost", "[DONE]")


async def test_nothing_is_tried_for_a_client_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.migration.FIRST_PAUSE_S", 10.0)  # a probe comes first
    scripts = Generating()
    engines = [MockEngine("prompt", scripts.prompt), MockEngine("completion", scripts.completion)]
    async with stack(*engines, max_migrations=5, refresh_s=0.02, migration_wait_s=60) as running:
        prompt, completion = running.engines

        async def loses_for_now(call: Call) -> None:
            completion.is_ready = False
            await loses_its_engine(call)

        scripts.faults[5] = loses_for_now
        asking = asyncio.create_task(running.complete(stream=True))
        async with asyncio.timeout(5):
            while running.services.directory.snapshot().engines[1].is_ready:
                await running.services.directory.wait_for_change()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: running.services.draining.num_open_requests == 0)
        completion.is_ready = True
        async with asyncio.timeout(5):
            while not running.services.directory.snapshot().engines[1].is_ready:
                await running.services.directory.wait_for_change()
        assert len(prompt.calls) == len(completion.calls) == 1


async def test_a_stream_never_moves_to_engines_that_are_too_short_for_it() -> None:
    scripts = Generating({5: breaks})
    engines = [MockEngine("prompt", scripts.prompt)]
    engines += [MockEngine("completion", scripts.completion) for _ in range(2)]
    async with stack(*engines, max_migrations=5, migration_wait_s=0.5) as running:
        other = running.engines[2]
        other.info = replace(other.info, max_model_len=201)
        running.services.directory.suspect(running.services.directory.snapshot().engines[2])
        async with asyncio.timeout(5):
            await running.services.directory.wait_for_change()
        await running.complete(max_tokens=200)
        assert not [call for call in other.calls if call.completion_request.num_replayed_tokens]


async def test_an_engine_that_stops_answering_probes_is_left_by_its_streams() -> None:
    scripts = Generating({5: stalls})
    async with two_pairs(scripts, stall_timeout_s=60.0, first_byte_timeout_s=60.0) as running:
        streaming = asyncio.create_task(streamed(running))
        calls = running.services.calls
        await until(lambda: not scripts.faults)
        (silent,) = (engine.url for engine in running.engines[2:] if engine.calls)

        def is_left() -> bool:
            """As every failed probe after the third does: nobody may be waiting at that moment."""
            for engine in running.services.directory.snapshot().engines:
                if engine.url == silent:
                    calls.waits.give_up(engine)
            return streaming.done()

        await until(is_left)
        assert whole(await streaming) == (TEXT, ["stop"])
        assert calls.waits.num_waits == 0
