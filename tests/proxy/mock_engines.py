"""Prompt, completion and NORMAL services with scripted behaviour, as real HTTP servers on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import msgspec
import uvicorn

from proxy.asgi import ASGIApp, Receive, Scope, Send
from proxy.http_protocol import HttpProtocol
from wire.services import (
    CompletionEvent,
    CompletionRequest,
    EngineInfo,
    EngineRole,
    ErrorBody,
    FinishReason,
    OutputToken,
    PromptChoice,
    PromptLogprobs,
    PromptRequest,
    PromptResponse,
    ServiceError,
    TokenLogprobs,
)
from wire.token_link import (
    LINK,
    LINK_PATH,
    CloseStream,
    FrameSplitter,
    OpenStream,
    StreamPart,
    decode_to_service,
    frame,
)

Script = Callable[["Call"], Coroutine[None, None, None]]

MODEL = "tiny"


def token(index: int, token_id: int, logprobs: TokenLogprobs | None = None) -> OutputToken:
    return OutputToken(index=index, token_id=token_id, logprobs=logprobs)


@dataclass
class Call:
    """One request that reached a mock, with the means to answer it piece by piece."""

    path: str
    body: bytes
    send: Send
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    arrived_s: float = 0.0

    @property
    def prompt_request(self) -> PromptRequest:
        return msgspec.json.decode(self.body, type=PromptRequest)

    @property
    def completion_request(self) -> CompletionRequest:
        return msgspec.json.decode(self.body, type=CompletionRequest)

    async def answer(self, status: int, content: bytes, headers: Sequence[tuple[str, str]] = ()) -> None:
        raw = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        raw += [(name.encode(), value.encode()) for name, value in headers]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})
        await self.send({"type": "http.response.body", "body": content})

    async def refuse(
        self,
        status: int,
        message: str,
        *,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        error = ServiceError(message=message, type=kind, param=param, code=code)
        await self.answer(status, msgspec.json.encode(ErrorBody(error=error)), headers)

    async def first_token(
        self,
        token_id: int,
        *,
        finish_reason: FinishReason | None = None,
        num_cached_tokens: int = 0,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        choice = PromptChoice(token=token(0, token_id, logprobs), finish_reason=finish_reason)
        await self.first_tokens(choice, num_cached_tokens=num_cached_tokens, prompt_logprobs=prompt_logprobs)

    async def first_tokens(
        self,
        *choices: PromptChoice,
        num_cached_tokens: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        request = self.prompt_request
        answer = PromptResponse(
            request_id=request.request_id,
            choices=choices,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        await self.answer(200, msgspec.json.encode(answer))

    async def accept(self) -> None:
        """Send the head of an event stream."""
        headers = [(b"content-type", b"text/event-stream")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def event(self, event: CompletionEvent) -> None:
        await self.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def tokens(self, first_index: int, token_ids: Sequence[int], **fields: object) -> None:
        tokens = tuple(token(first_index + offset, token_id) for offset, token_id in enumerate(token_ids))
        await self.event(CompletionEvent(tokens=tokens, **fields))

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b""})


@dataclass
class LinkedCall(Call):
    """A stream of a token link, for the same scripts."""

    number: int = 0

    async def part(self, part: StreamPart) -> None:
        await self.write(frame([part]))

    async def accept(self) -> None:
        await self.part(StreamPart(self.number, is_accepted=True))

    async def refuse(
        self,
        status: int,
        message: str,
        *,
        kind: str = "server_error",
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        error = ServiceError(message=message, type=kind, param=param, code=code)
        await self.part(StreamPart(self.number, error=error, error_status=status))

    async def event(self, event: CompletionEvent) -> None:
        logprobs = [made.logprobs for made in event.tokens]
        await self.part(
            StreamPart(
                self.number,
                choice=event.choice,
                first_index=event.tokens[0].index if event.tokens else 0,
                token_ids=tuple(made.token_id for made in event.tokens),
                finish_reason=event.finish_reason,
                num_cached_tokens=event.num_cached_tokens,
                logprobs=tuple(logprobs) if any(logprobs) else None,
                error=event.error,
                error_status=event.error_status,
                prompt_logprobs=event.prompt_logprobs,
            )
        )

    async def end(self) -> None:
        """A stream of a link ends with its last choice."""


class MockEngine:
    """One engine; `script` answers its generation calls, and every one of them is kept in `calls`."""

    def __init__(self, role: EngineRole, script: Script, *, has_link: bool = True) -> None:
        self.role = role
        self.script = script
        self.calls: list[Call] = []
        self.withdrawn: list[str] = []
        """Hand-over ids that the proxy wants no more."""
        self.is_ready = True
        self.grace_left_s: float | None = None
        """Told with being not ready."""
        self._links: list[Send] = []
        self.num_connections = 0
        self.num_links = 0
        self.info = EngineInfo(
            role=role,
            engine_id=f"{role}-1",
            epoch=1,
            model=MODEL,
            compatibility_hash="equal",
            control_address="tcp://127.0.0.1:9" if role == "prompt" else None,
            max_model_len=256,
            max_num_seqs=8,
            block_size=4,
            num_usable_blocks=1000,
            num_free_blocks=1000,
            has_token_link=has_link,
            version="0",
        )
        self.url = ""
        self.connections: set[tuple[str, int]] = set()
        """Every one that ever brought a request, by the address of its other end."""
        self.num_probes = 0
        self._arrival = asyncio.Condition()

    async def call(self, number: int = 0) -> Call:
        """Wait for the generation call of this number."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self.calls) > number)
        return self.calls[number]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.connections.add(scope["client"])
        if scope["path"] == LINK_PATH:
            await self._serve_link(receive, send)
            return
        body = await _body(receive)
        call = Call(scope["path"], body, send, arrived_s=asyncio.get_running_loop().time())
        if scope["method"] == "GET":
            await self._answer_probe(call)
            return
        if scope["method"] == "DELETE":
            self.withdrawn.append(call.path.removeprefix("/v1/handovers/"))
            await call.send({"type": "http.response.start", "status": 204, "headers": []})
            await call.end()
            return
        await self._keep(call)
        await self._run_script(call, receive)

    async def _keep(self, call: Call) -> None:
        async with self._arrival:
            self.calls.append(call)
            self._arrival.notify_all()

    async def drain(self, grace_s: float) -> None:
        """Say that it leaves, over its links and to who asks."""
        self.is_ready, self.grace_left_s = False, grace_s
        data = frame([StreamPart(LINK, leaves_in_s=grace_s)])
        for send in self._links:
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _serve_link(self, receive: Receive, send: Send) -> None:
        """Run the script once for every stream; one that aborts takes the link with it."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.num_links += 1
        self._links.append(send)
        splitter, running = FrameSplitter(), dict[int, tuple[LinkedCall, asyncio.Task[None]]]()
        try:
            while (message := await receive())["type"] == "http.request":
                for data in splitter.push(message["body"]):
                    match decode_to_service(data):
                        case OpenStream(number, request):
                            decoded = msgspec.msgpack.decode(request, type=CompletionRequest)
                            call = LinkedCall(
                                "/v1/completion", msgspec.json.encode(decoded), send, number=number
                            )
                            await self._keep(call)
                            task = asyncio.create_task(self._run_linked(call))
                            running[number] = (call, task)
                        case CloseStream(number):
                            call, task = running.pop(number)
                            call.client_left.set()
                            task.cancel()
        finally:
            for call, task in running.values():
                call.client_left.set()
                task.cancel()
            await asyncio.gather(*(task for _, task in running.values()), return_exceptions=True)

    async def _run_linked(self, call: "LinkedCall") -> None:
        try:
            await self.script(call)
        except ConnectionAbortedError:
            await call.send({"type": "http.response.body", "body": b""})

    async def _answer_probe(self, call: Call) -> None:
        self.num_probes += 1
        if call.path == "/info":
            await call.answer(200, msgspec.json.encode(self.info))
        else:
            state = {"status": "ready" if self.is_ready else "draining", "grace_left_s": self.grace_left_s}
            await call.answer(200 if self.is_ready else 503, msgspec.json.encode(state))

    async def _run_script(self, call: Call, receive: Receive) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.client_left.set()

        running = asyncio.create_task(self.script(call))
        watching = asyncio.create_task(watch())
        try:
            await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            watching.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, *, lifespan: str = "off") -> AsyncIterator[str]:
    """Serve an ASGI app on a free loopback port; yields its base URL."""
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it each answer takes 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        # Small and fixed, so that what nobody reads is soon noticed.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan=lifespan,
            timeout_graceful_shutdown=1,
        )
        server = QuickServer(config)
        task = asyncio.create_task(server.serve_here(listening))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.stopping.set()
            await task


class QuickServer(uvicorn.Server):
    """A server without signal handlers and without uvicorn's tenth-of-a-second ticks."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def serve_here(self, listening: socket.socket) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[listening])
        await self.stopping.wait()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self.lifespan.shutdown()
        while self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)
