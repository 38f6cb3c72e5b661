"""An engine for benchmarks of proxies: it computes nothing, and speaks to every kind of router.

`python -m benchmarks.mock_engine --port P --step-s 0.05 --model NAME`: a token for every stream at each
step, the first one (or `--burst` of them) at once; with `--step-s 0` as fast as the reader takes them.
OpenAI's endpoints serve routers that pass text through, `/v1/link` serves Tandem's proxy, to which this is a
NORMAL engine, or with `--role` one of a pair: the prompt engine answers at once.
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec
import uvloop

from wire.json_body import to_json
from wire.link_sending import hold_little
from wire.services import (
    CompletionRequest,
    EngineInfo,
    EngineRole,
    FinishReason,
    OutputToken,
    PromptChoice,
    PromptRequest,
    PromptResponse,
)
from wire.token_link import (
    BEAT_S,
    LINK_PATH,
    CloseStream,
    FrameSplitter,
    OpenStream,
    StreamPart,
    decode_to_service,
    frame,
)

FIRST_TOKEN_ID = 1000
"""Of a run of ordinary words in the embedded model's vocabulary."""
NUM_TOKEN_IDS = 500
LONGEST = 1 << 20
JSON_TYPE = b"application/json"

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"


@dataclass(slots=True)
class TextStream:
    """A stream of OpenAI's on a connection of its own."""

    connection: "MockConnection"
    num_left: int
    chunk: bytes


@dataclass(slots=True)
class LinkStream:
    num_left: int
    index: int = 0


@dataclass(slots=True)
class Link:
    """A token link and its streams by number."""

    connection: "MockConnection"
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    streams: dict[int, LinkStream] = field(default_factory=dict)


class MockEngine:
    """All connections of this process; `step` moves every stream on by a token."""

    def __init__(self, model: str, num_at_once: int = 1, role: EngineRole = "normal") -> None:
        """`num_at_once`: tokens that a stream of a link begins with."""
        self.model = model
        self._role = role
        self._num_at_once = num_at_once
        self.text_streams: dict[MockConnection, TextStream] = {}
        self.links: dict[MockConnection, Link] = {}
        self.can_step = asyncio.Event()
        """Some stream may have taken a token; an engine without pace would otherwise never sleep, and take
        a processor from what is measured."""

    def step(self) -> None:
        self.can_step.clear()
        for stream in list(self.text_streams.values()):
            self.step_text(stream)
        for link in self.links.values():
            if not link.connection.is_paused and link.streams:
                self.can_step.set()
                parts = [self._part(number, stream) for number, stream in link.streams.items()]
                link.streams = {number: stream for number, stream in link.streams.items() if stream.num_left}
                link.connection.write_chunk(frame(parts))

    def step_text(self, stream: TextStream) -> None:
        if stream.connection.is_paused:
            return
        self.can_step.set()
        stream.num_left -= 1
        stream.connection.write_chunk(stream.chunk)
        if not stream.num_left:
            del self.text_streams[stream.connection]
            stream.connection.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def open_link_stream(self, link: Link, message: OpenStream) -> None:
        """Accepted, and its first tokens."""
        request = msgspec.msgpack.decode(message.request, type=CompletionRequest)
        num_before = 0 if request.handover_id is None else 1  # drawn by the prompt engine
        stream = LinkStream(request.sampling.max_tokens - num_before, num_before)
        parts = [StreamPart(message.stream, is_accepted=True)]
        for _ in range(min(self._num_at_once, stream.num_left)):
            parts.append(self._part(message.stream, stream))
        if stream.num_left:
            link.streams[message.stream] = stream
            self.can_step.set()
        link.connection.write_chunk(frame(parts))

    def beat(self) -> None:
        for connection in self.links:
            connection.write_chunk(frame([]))

    def answer(self, path: str) -> bytes:
        """What is asked with GET."""
        match path:
            case "/info":
                return to_json(_info(self.model, self._role))
            case "/v1/models":
                return to_json({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        return to_json({"status": "ready", "model_path": self.model, "model_id": self.model})

    def first_token(self, body: bytes) -> bytes:
        """Of a prompt that a pair's prompt engine has computed."""
        request = msgspec.json.decode(body, type=PromptRequest)
        reason: FinishReason | None = "length" if request.sampling.max_tokens == 1 else None
        choice = PromptChoice(token=OutputToken(index=0, token_id=FIRST_TOKEN_ID), finish_reason=reason)
        return to_json(
            PromptResponse(
                request_id=request.request_id,
                choices=(choice,),
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0,
            )
        )

    def _part(self, number: int, stream: LinkStream) -> StreamPart:
        index = stream.index
        stream.index += 1
        stream.num_left -= 1
        reason = None if stream.num_left else "length"
        return StreamPart(number, 0, index, (FIRST_TOKEN_ID + index % NUM_TOKEN_IDS,), reason)  # type: ignore[arg-type]


class MockConnection(asyncio.Protocol):
    """One HTTP/1.1 connection of a router."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = ""
        self._body = b""
        self._link: Link | None = None
        self.is_paused = False

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def write_chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _answer(self, content: bytes) -> None:
        head = _HEAD % JSON_TYPE
        self.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(content), content))

    def _generate(self) -> None:
        request = json.loads(self._body)
        is_chat = "messages" in request
        num_tokens = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        if request.get("stream"):
            self.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
            stream = TextStream(self, num_tokens, _chunk(self._engine.model, is_chat))
            self._engine.text_streams[self] = stream
            self._engine.step_text(stream)
        else:
            self._answer(_whole(self._engine.model, is_chat, num_tokens))

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._body = b""

    def on_url(self, url: bytes) -> None:
        self._path = url.decode().partition("?")[0]

    def on_headers_complete(self) -> None:
        if self._path == LINK_PATH:
            self._link = self._engine.links[self] = Link(self)
            assert self._transport is not None
            hold_little(self._transport)
            self.write(_HEAD % b"application/octet-stream" + b"transfer-encoding: chunked\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._link is None:
            self._body += body
            return
        for data in self._link.splitter.push(body):
            match decode_to_service(data):
                case OpenStream() as message:
                    self._engine.open_link_stream(self._link, message)
                case CloseStream(number):
                    self._link.streams.pop(number, None)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST" and "completions" in self._path:
            self._generate()
        elif self._path == "/v1/prompt":
            self._answer(self._engine.first_token(self._body))
        else:
            self._answer(self._engine.answer(self._path))

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._engine.can_step.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._engine.text_streams.pop(self, None)
        self._engine.links.pop(self, None)


def _chunk(model: str, is_chat: bool) -> bytes:
    """The bytes that a token costs with vLLM's and SGLang's servers, too."""
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    text = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
    choice = {"index": 0, **text, "logprobs": None, "finish_reason": None}
    chunk = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": kind, "created": 1, "model": model}
    return b"data: " + to_json({**chunk, "choices": [choice]}) + b"\n\n"


def _whole(model: str, is_chat: bool, num_tokens: int) -> bytes:
    text = " word" * num_tokens
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}
    kind = "chat.completion" if is_chat else "text_completion"
    head = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": kind, "created": 1, "model": model}
    return to_json({**head, "choices": [choice], "usage": usage})


def _info(model: str, role: EngineRole) -> EngineInfo:
    return EngineInfo(
        role=role,
        engine_id="mock",
        control_address="tcp://127.0.0.1:9" if role == "prompt" else None,
        epoch=1,
        model=model,
        compatibility_hash="mock",
        max_model_len=LONGEST,
        max_num_seqs=LONGEST,
        block_size=16,
        num_usable_blocks=LONGEST,
        num_free_blocks=LONGEST,
        has_token_link=role != "prompt",
        version="0",
    )


async def serve(port: int, step_s: float, model: str, num_at_once: int, role: EngineRole) -> None:
    loop = asyncio.get_running_loop()
    engine = MockEngine(model, num_at_once, role)
    await loop.create_server(lambda: MockConnection(engine), "127.0.0.1", port, backlog=2048)
    asyncio.create_task(_every(BEAT_S, engine.beat))  # noqa: RUF006 - the process lives as long as it does
    await _every(step_s, engine.step, engine.can_step)


async def _every(period_s: float, act: Callable[[], None], may_act: asyncio.Event | None = None) -> None:
    loop = asyncio.get_running_loop()
    next_s = loop.time()
    while True:
        if may_act is not None:
            await may_act.wait()
        next_s = max(next_s + period_s, loop.time())
        await asyncio.sleep(next_s - loop.time())
        act()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--burst", type=int, default=1)
    parser.add_argument("--role", choices=("normal", "prompt", "completion"), default="normal")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.step_s, arguments.model, arguments.burst, arguments.role))


if __name__ == "__main__":
    main()
