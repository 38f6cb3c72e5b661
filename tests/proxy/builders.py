"""A tiny model and a stack of proxy and mock engines around it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from proxy.app import create_app
from proxy.chat_template import ChatTemplate
from proxy.proxy_services import ProxyServices
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from tests.proxy.mock_engines import MODEL, Call, MockEngine, Script, serving

TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{{ '<|start|>assistant\n' }}"
)


def byte_tokenizer() -> Tokenizer:
    """Byte-level, without merges: token id = place of the byte in GPT-2's alphabet; `<|end|>` ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer


DEFAULTS: dict[str, object] = {
    "model": MODEL,
    "refresh_s": 60.0,
    "max_migrations": 0,
    "connect_timeout_s": 20.0,
}
"""A failure is the client's at once; tests of migration ask for it. A machine may pause while it connects."""

TOKENIZER = byte_tokenizer()
END_ID: int = TOKENIZER.token_to_id("<|end|>")


def ids(text: str) -> list[int]:
    """One token a byte."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def text_model(template: str | None = TEMPLATE) -> TextModel:
    return TextModel(
        name=MODEL,
        tokenizer=TOKENIZER,
        template=None if template is None else ChatTemplate(template, {}),
        eos_token_ids=(END_ID,),
    )


@dataclass
class Stack:
    """A running proxy, its engines, and a client for it."""

    url: str
    client: httpx.AsyncClient
    services: ProxyServices
    engines: list[MockEngine]

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(**fields))

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json=text_body(**fields))

    def metric(self, name: str, **labels: str) -> float:
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0


def chat_body(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def text_body(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


@dataclass
class Answering:
    """Scripts of a pair that generates `text` and ends with `finish_reason`."""

    text: str
    finish_reason: Any = "stop"
    num_cached_tokens: int = 0
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = ids(self.text) + ([END_ID] if self.finish_reason == "stop" else [])

    async def prompt(self, call: Call) -> None:
        reason = self.finish_reason if len(self.ids) == 1 else None
        await call.first_token(self.ids[0], finish_reason=reason, num_cached_tokens=self.num_cached_tokens)

    async def completion(self, call: Call) -> None:
        await call.accept()
        for index in range(1, len(self.ids)):
            reason = self.finish_reason if index == len(self.ids) - 1 else None
            await call.tokens(index, [self.ids[index]], finish_reason=reason)
        await call.end()

    async def normal(self, call: Call) -> None:
        await call.accept()
        for index, token_id in enumerate(self.ids):
            reason = self.finish_reason if index == len(self.ids) - 1 else None
            cached = self.num_cached_tokens if index == 0 else None
            await call.tokens(index, [token_id], finish_reason=reason, num_cached_tokens=cached)
        await call.end()


@contextlib.asynccontextmanager
async def stack(
    *engines: MockEngine, wait_ready: bool = True, template: str | None = TEMPLATE, **settings: object
) -> AsyncIterator[Stack]:
    """Serve the engines and a proxy in front of them, all in this event loop."""
    async with contextlib.AsyncExitStack() as exits:
        urls: dict[str, list[str]] = {"prompt": [], "completion": [], "normal": []}
        for engine in engines:
            engine.url = engine.url or await exits.enter_async_context(serving(engine))
            urls[engine.role].append(engine.url)
        values = {f"{role}_url": role_urls for role, role_urls in urls.items()}
        app = create_app(ProxySettings(**{**DEFAULTS, **values, **settings}), text_model(template))
        services: ProxyServices = app.state.services
        url = await exits.enter_async_context(serving(app, lifespan="on"))
        client = await exits.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30, trust_env=False))
        if wait_ready:
            await all_ready(services)
        yield Stack(url, client, services, list(engines))


async def all_ready(services: ProxyServices, *, within_s: float = 20.0) -> None:
    directory = services.directory
    try:
        async with asyncio.timeout(within_s):
            while waiting := [engine for engine in directory.snapshot().engines if not engine.is_routable]:
                await directory.wait_for_change()
    except TimeoutError:
        problems = [f"{engine.role} {engine.url}: {engine.problem}" for engine in waiting]
        raise AssertionError(f"not ready within {within_s:g} s: {problems}") from None


def pair_stack(
    prompt: Script, completion: Script, *, has_link: bool = True, **settings: object
) -> contextlib.AbstractAsyncContextManager[Stack]:
    """`has_link`: as Tandem's engines; without, the completion leg is a request of its own."""
    engines = MockEngine("prompt", prompt), MockEngine("completion", completion, has_link=has_link)
    return stack(*engines, **settings)


async def until(is_true: Callable[[], bool | Awaitable[bool]], *, within_s: float = 5.0) -> None:
    """Ask again and again; only for what sockets or another process do."""
    async with asyncio.timeout(within_s):
        while True:
            answer = is_true()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.002)


def events(body: str) -> list[str]:
    """The data of each server-sent event of a complete body."""
    assert body.endswith("\n\n")
    frames = body.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]
