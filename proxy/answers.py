"""The two shapes of an answer: streamed as it is generated, or whole at the end."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from proxy.activity import Activity, Trace
from proxy.client import Client
from proxy.detokenizer import Vocabulary
from proxy.echo import Echo
from proxy.errors import ProxyError
from proxy.message_delta import FinishReason, MessageDelta, ToolCallDelta
from proxy.message_parser import MessageParser
from proxy.metrics import ProxyMetrics
from proxy.native.loading import Outlet, PlainStream
from proxy.openai_responses import (
    DONE,
    Answer,
    ContentChunks,
    ResponseBuilder,
    ToolCall,
    Usage,
    error_frame,
)
from proxy.text_stream import EndOfText, TextDelta, TextStream
from proxy.token_batch import TokenBatch
from proxy.token_text import TokenText
from wire.services import OutputToken


class ChoiceClock:
    """Times one choice's tokens for the metrics and the web page."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        activity: Activity,
        trace: Trace,
        endpoint: str,
        started_s: float,
        on_first: Callable[[], None],
    ) -> None:
        self._on_first = on_first
        self._metrics = metrics
        self._activity = activity
        self._observe = metrics.inter_token.observe
        self._next_token = activity.next_token
        self._trace = trace
        self._endpoint = endpoint
        self._previous_s = started_s
        self._is_first = True

    def tick(self) -> None:
        now_s = time.monotonic()
        elapsed_s, self._previous_s = now_s - self._previous_s, now_s
        if self._is_first or self._trace.is_to_arrive:
            self._trace.token(now_s, is_first_of_choice=self._is_first)
        if self._is_first:
            self._metrics.time_to_first_token.of(self._endpoint).observe(elapsed_s)
            self._activity.first_token(elapsed_s, now_s)
            self._is_first = False
            self._on_first()
        else:
            self._observe(elapsed_s)
            self._next_token(elapsed_s, now_s)

    @property
    def previous_s(self) -> float | None:
        """When the latest token came; None where the next one is no token like all others."""
        return None if self._is_first or self._trace.is_to_arrive else self._previous_s

    def resume(self, previous_s: float) -> None:
        """The tokens up to then were counted elsewhere."""
        self._previous_s = previous_s


class Choice:
    """The sink of one choice's tokens: text, its parts, counts, and whom to give them to."""

    def __init__(
        self,
        text: TextStream,
        parser: MessageParser,
        clock: ChoiceClock,
        out: "ChoiceOutput",
        vocabulary: Vocabulary,
        echo: Echo | None = None,
    ) -> None:
        """`echo`: what the choice begins with."""
        self._vocabulary = vocabulary
        self._text = text
        self._parser = parser
        self._clock = clock
        self._out = out
        self._echo = echo
        self._is_text_only = text.is_text_only and parser.is_plain and echo is None
        self._num_cached_tokens: int | None = None
        self.num_reasoning_tokens = 0
        """Tokens after which the model was still thinking."""

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of the engine that prefilled, which is the first to say a number."""
        return self._num_cached_tokens or 0

    def accept(self, batch: TokenBatch) -> bool:
        self._clock.tick()
        if self._num_cached_tokens is None:
            self._num_cached_tokens = batch.num_cached_tokens
        if self._is_text_only and batch.finish_reason is None:
            self._out.write_content(self._text.push_text(batch.tokens))
            return True
        if self._echo is not None:
            return self._accept_first(self._echo, batch)
        if not self._parser.may_think or len(batch.tokens) <= 1:
            return self._push(batch.tokens, batch.finish_reason)
        # One by one, so that the tokens of the reasoning can be told from the others.
        *firsts, last = batch.tokens
        return all(self._push((token,), None) for token in firsts) and self._push(
            (last,), batch.finish_reason
        )

    def begin_plain(self, choice: int, next_index: int) -> PlainStream | None:
        previous_s = self._clock.previous_s
        if not self._is_text_only or previous_s is None:
            return None
        words, events = self._text.words(), self._out.plain_events()
        if words is None or events is None:
            return None
        before, after = events.around
        return PlainStream(
            words,
            choice=choice,
            next_index=next_index,
            last_s=previous_s,
            before=before,
            after=after,
            outlet=events.outlet,
            put=events.put,
        )

    def end_plain(self, plain: PlainStream) -> None:
        self._clock.resume(plain.last_s)
        self._text.resume(plain.num_tokens, plain.pending)
        self._out.end_plain(plain.text)

    def _accept_first(self, echo: Echo, batch: TokenBatch) -> bool:
        """Only texts have an echo, and they have no parts."""
        self._echo = None
        tokens, reason = ((), "length") if echo.is_all else (batch.tokens, batch.finish_reason)
        text = self._text.push(tokens, reason)
        prompt = echo.tokens(self._vocabulary, batch.prompt_logprobs)
        return self._write(
            msgspec.structs.replace(text, text=echo.text + text.text, logprobs=prompt + text.logprobs)
        )

    def _push(self, tokens: tuple[OutputToken, ...], finish_reason: EndOfText | None) -> bool:
        is_going_on = self._write(self._text.push(tokens, finish_reason))
        if self._parser.is_thinking:
            self.num_reasoning_tokens += len(tokens)
        return is_going_on

    def _write(self, text: TextDelta) -> bool:
        delta = self._parser.push(text)
        self._out.write(delta)
        return delta.finish_reason is None


class ChoiceOutput(Protocol):
    def write(self, delta: MessageDelta) -> None: ...

    def write_content(self, text: str) -> None:
        """A delta with this content and nothing else; it may be empty."""
        ...

    def plain_events(self) -> "PlainEvents | None":
        """How `write_content` writes it from now on; None while it does more than that."""
        ...

    def end_plain(self, text: str) -> None:
        """Content that was to be kept, of tokens taken elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class PlainEvents:
    """Where content goes, each piece with the same JSON around it; without `put` it is kept."""

    around: tuple[bytes, bytes] = b"", b""
    outlet: Outlet | None = None
    put: Callable[[bytes], None] | None = None


class StreamedChoice:
    """Writes each delta to the client at once."""

    def __init__(self, index: int, client: Client, stream: "ChunkStream") -> None:
        self._index = index
        self._client = client
        self._stream = stream
        self._is_first = True
        self._content_chunks = stream.content_chunks(index)

    def write_content(self, text: str) -> None:
        if self._content_chunks is None or self._is_first:
            self.write(MessageDelta(content=text))
        elif text:
            self._client.send_events(self._content_chunks.chunk(text))

    def plain_events(self) -> PlainEvents | None:
        if self._content_chunks is None or self._is_first:
            return None
        is_ready, outlet = self._client.outlet()
        return (
            PlainEvents(self._content_chunks.around, outlet, self._client.send_events) if is_ready else None
        )

    def end_plain(self, text: str) -> None:
        assert not text

    def write(self, delta: MessageDelta) -> None:
        if self._content_chunks is not None and delta.is_plain and not self._is_first:
            self._client.send_events(self._content_chunks.chunk(delta.content))
            return
        events = b""
        if self._is_first or delta.has_parts:
            events = self._stream.delta(self._index, delta, self._is_first)
            self._is_first = False
        if delta.finish_reason is not None:
            events += self._stream.finish(self._index, delta.finish_reason)
        if events:
            self._client.send_events(events)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStream:
    """What the chunks of one request have in common."""

    builder: ResponseBuilder
    with_logprobs: bool
    usage: Callable[[], Usage] | None
    """Of the request so far, for every chunk."""

    def content_chunks(self, index: int) -> ContentChunks | None:
        """For deltas of content alone, where nothing else is in their chunks."""
        if self.with_logprobs or self.usage is not None:
            return None
        return self.builder.content_chunks(index)

    def delta(self, index: int, delta: MessageDelta, is_first: bool) -> bytes:
        return self.builder.delta_chunk(
            index, delta, is_first=is_first, with_logprobs=self.with_logprobs, usage=self._usage_now()
        )

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self.builder.finish_chunk(index, reason, self._usage_now())

    def _usage_now(self) -> Usage | None:
        return None if self.usage is None else self.usage()


class WholeChoice:
    """Keeps everything until the choice is finished."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: list[TokenText] = []
        self._finish_reason: FinishReason | None = None

    def write_content(self, text: str) -> None:
        self._content.append(text)

    def plain_events(self) -> PlainEvents:
        return PlainEvents()

    def end_plain(self, text: str) -> None:
        self._content.append(text)

    def write(self, delta: MessageDelta) -> None:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            self._add_call(call)
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason

    def _add_call(self, delta: ToolCallDelta) -> None:
        if delta.call_id is not None and delta.name is not None:
            assert delta.index == len(self._calls)
            self._calls.append(ToolCall(delta.call_id, delta.name, delta.arguments))
            return
        call = self._calls[delta.index]
        self._calls[delta.index] = replace(call, arguments=call.arguments + delta.arguments)

    def answer(self, *, with_logprobs: bool) -> Answer:
        assert self._finish_reason is not None
        return Answer(
            text="".join(self._content),
            finish_reason=self._finish_reason,
            logprobs=self._logprobs if with_logprobs else None,
            reasoning="".join(self._reasoning),
            tool_calls=self._calls,
        )


class AnswerShape(Protocol):
    def choice_output(self, index: int) -> ChoiceOutput: ...

    async def finish(self, usage: Usage) -> None: ...

    def broken(self, error: ProxyError) -> bytes:
        """The events that end a stream which cannot go on."""
        ...


class StreamedAnswer:
    def __init__(self, client: Client, stream: ChunkStream, *, include_usage: bool) -> None:
        self._client = client
        self._stream = stream
        self._include_usage = include_usage

    def choice_output(self, index: int) -> ChoiceOutput:
        return StreamedChoice(index, self._client, self._stream)

    async def finish(self, usage: Usage) -> None:
        usage_event = self._stream.builder.usage_chunk(usage) if self._include_usage else b""
        await self._client.end_events(usage_event + DONE)

    def broken(self, error: ProxyError) -> bytes:
        return error_frame(error.body) + DONE


class WholeAnswer:
    def __init__(
        self, client: Client, builder: ResponseBuilder, *, with_logprobs: bool, extras: Mapping[str, Any]
    ) -> None:
        """`extras` may be filled until the answer is finished."""
        self._client = client
        self._builder = builder
        self._with_logprobs = with_logprobs
        self._extras = extras
        self._choices: list[WholeChoice] = []

    def choice_output(self, index: int) -> ChoiceOutput:
        assert index == len(self._choices)
        self._choices.append(WholeChoice())
        return self._choices[index]

    async def finish(self, usage: Usage) -> None:
        answers = [choice.answer(with_logprobs=self._with_logprobs) for choice in self._choices]
        await self._client.send_json(200, self._builder.whole(answers, usage, self._extras))

    def broken(self, error: ProxyError) -> bytes:
        raise AssertionError("a whole answer is sent at once or not at all")
