import httpx
import msgspec

from proxy.cache_reader import CacheReader
from proxy.fleet import Engine, EngineStart
from proxy.prefix_index import PrefixIndex
from tests.proxy.builders import Answering, pair_stack
from wire.cache import CacheEvent, CacheEvents, prompt_block_names

A, B = EngineStart("http://a", 1), EngineStart("http://b", 1)
TOKENS = list(range(20))
NAMES = prompt_block_names(TOKENS, 4)


def test_the_leading_blocks_that_are_held_are_found_per_engine() -> None:
    index = PrefixIndex()
    index.insert(NAMES, [A])
    index.insert(NAMES[:2], [B])
    assert index.num_cached(NAMES, [A, B]) == {A: 5, B: 2}
    assert index.num_cached(prompt_block_names([*TOKENS[:6], 99, 99], 4), [A, B]) == {A: 1, B: 1}
    assert index.num_cached(prompt_block_names([99, *TOKENS], 4), [A, B]) == {}


def test_an_engine_that_has_restarted_has_nothing() -> None:
    index = PrefixIndex()
    index.insert(NAMES, [A])
    assert index.num_cached(NAMES, [EngineStart("http://a", 2)]) == {}


def test_what_an_engine_says_is_gone_is_gone_there_and_nowhere_else() -> None:
    index = PrefixIndex()
    index.apply(A, CacheEvent(kind="stored", names=tuple(NAMES)))
    index.insert(NAMES, [B])
    index.apply(A, CacheEvent(kind="removed", names=(NAMES[3],)))
    assert index.num_cached(NAMES, [A, B]) == {A: 3, B: 5}
    index.apply(A, CacheEvent(kind="cleared"))
    assert index.num_cached(NAMES, [A, B]) == {B: 5}
    index.apply(B, CacheEvent(kind="cleared"))
    assert len(index) == 0


def test_the_blocks_used_last_are_remembered() -> None:
    index = PrefixIndex(max_blocks=5)
    others = prompt_block_names([7] * 8, 4)
    index.insert(NAMES, [A])
    index.insert(others, [A])
    assert len(index) == 5
    assert index.num_cached(others, [A]) == {A: 2}
    assert index.num_cached(NAMES, [A]) == {}


async def test_events_are_read_from_where_the_last_answer_ended() -> None:
    asked: list[str] = []
    told: list[tuple[str, tuple[CacheEvent, ...]]] = []
    event = CacheEvent(kind="stored", names=tuple(NAMES))

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        news = CacheEvents(engine_id="e", epoch=1, block_size=4, next_event=7, events=(event,))
        return httpx.Response(200, content=msgspec.json.encode(news))

    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        directory = running.services.directory
        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))

        def take(engine: Engine, events: object) -> None:
            told.append((engine.role, tuple(events)))  # type: ignore[arg-type]

        reader = CacheReader(http, directory, take, refresh_s=1.0)
        await reader.read_all()
        await reader.read_all()
        await http.aclose()
    assert told == [("prompt", (event,)), ("completion", (event,))] * 2
    assert asked == ["epoch=1&after=0"] * 2 + ["epoch=1&after=7"] * 2


async def test_an_engine_that_has_no_events_is_not_asked_every_time() -> None:
    asked: list[str] = []
    answers = {"prompt": httpx.Response(404, content=b"{}"), "completion": httpx.Response(503)}

    def answer(request: httpx.Request) -> httpx.Response:
        role = roles[f"{request.url.scheme}://{request.url.netloc.decode()}"]
        asked.append(role)
        return answers[role]

    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        directory = running.services.directory
        roles = {engine.url: engine.role for engine in directory.snapshot().engines}
        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        reader = CacheReader(http, directory, lambda engine, events: None, refresh_s=1.0)
        await reader.read_all()
        await reader.read_all()
        await http.aclose()
    assert sorted(asked) == ["completion", "completion", "prompt"]
