"""The HTTP side of the two sockets to one engine process.

A request's life here: `open_stream` sends it to the engine and registers a queue under its id; `receive`
puts each of its outputs into that queue; leaving the stream's context removes the queue and, unless the
request has ended by itself, tells the engine to abort it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Protocol

import zmq
import zmq.asyncio

from engine.ipc import (
    Abort,
    AddRequest,
    Command,
    Event,
    RequestOutput,
    Shutdown,
    StepEvents,
    Withdraw,
    decode_event,
    encode,
)
from engine.serving.errors import EngineRefused, EngineUnavailable, InvalidRequest
from engine.serving.signals import ScalingSignals


class OutputReceiver(Protocol):
    """Gets a request's outputs, in order."""

    has_ended: bool
    """The engine has forgotten the request: there is nothing to abort."""

    def put(self, item: RequestOutput | EngineUnavailable) -> None:
        """Never waits."""


class RequestStream:
    """The outputs of one request, in order, until the one that ends it."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[RequestOutput | EngineUnavailable] = asyncio.Queue()
        self.has_ended = False

    def put(self, item: RequestOutput | EngineUnavailable) -> None:
        self._outputs.put_nowait(item)

    async def next(self) -> RequestOutput:
        """The next output; raises `EngineRefused` or `EngineUnavailable` where the request failed."""
        item = await self._outputs.get()
        if isinstance(item, EngineUnavailable):
            self.has_ended = True
            raise item
        self.has_ended = item.is_last
        if item.failure is not None:
            raise EngineRefused(item.failure.status, item.failure.error)
        return item

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while not self.has_ended:
            yield await self.next()


class EngineLink:
    """Commands to, and events from, one engine process. Bound before that process starts."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        command_endpoint: str,
        event_endpoint: str,
        signals: ScalingSignals,
    ) -> None:
        self._commands = context.socket(zmq.PUSH)
        self._events = context.socket(zmq.PULL)
        for socket, endpoint in ((self._commands, command_endpoint), (self._events, event_endpoint)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(endpoint)
        self._streams: dict[str, OutputReceiver] = {}
        self._signals = signals

    @property
    def num_open_streams(self) -> int:
        return len(self._streams)

    async def receive(self) -> Event:
        """The engine's next event; outputs of requests have then been delivered to their streams."""
        event = decode_event(await self._events.recv())
        if isinstance(event, StepEvents):
            self._signals.on_step([output.request_id for output in event.outputs if output.tokens])
            for output in event.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:  # otherwise the client left while this output was on its way
                    stream.put(output)
        return event

    @contextmanager
    def open_stream(self, request: AddRequest) -> Iterator[RequestStream]:
        """Send `request` to the engine; on leaving, abort it unless it has ended."""
        stream = RequestStream()
        self.open(request, stream)
        try:
            yield stream
        finally:
            self.close_request(request.request_id)

    def open(self, request: AddRequest, receiver: OutputReceiver) -> None:
        """Send `request` to the engine and its outputs to `receiver`, until `close_request`."""
        if request.request_id in self._streams:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is already being served", param="request_id"
            )
        self._streams[request.request_id] = receiver
        num_to_compute = len(request.prompt_token_ids) if request.prompt_engine is None else 0
        self._signals.begin(request.request_id, num_to_compute)
        self._send(request)

    def close_request(self, request_id: str, *, keeps_handover: bool = False) -> None:
        """Take no more outputs of a request; abort it unless it has ended.

        `keeps_handover`: another completion engine may take what it was to take over.
        """
        receiver = self._streams.pop(request_id, None)
        self._signals.end(request_id)
        if receiver is not None and not receiver.has_ended:
            self._send(Abort(request_id, keeps_handover))

    def withdraw(self, handover_id: str) -> None:
        self._send(Withdraw(handover_id))

    def fail_all(self, message: str) -> None:
        """End every open stream with `EngineUnavailable`."""
        for stream in list(self._streams.values()):
            stream.put(EngineUnavailable(message, code="engine_lost"))

    def request_shutdown(self) -> None:
        self._send(Shutdown())

    def close(self) -> None:
        self._commands.close()
        self._events.close()

    def _send(self, command: Command) -> None:
        # No high-water mark on an ipc socket: the send completes at once and the future is already done.
        if not self._commands.closed:
            self._commands.send(encode(command))
