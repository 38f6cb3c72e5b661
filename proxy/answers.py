"""The two shapes of an answer: streamed as it is generated, or whole at the end."""

import time
from typing import Protocol

from proxy.client import Client
from proxy.metrics import ProxyMetrics
from proxy.openai_responses import DONE, Answer, ResponseBuilder, Usage
from proxy.text_stream import TextDelta, TextStream
from proxy.token_batch import TokenBatch
from proxy.token_text import TokenText


class ChoiceClock:
    """Times one choice's tokens for the metrics."""

    def __init__(self, metrics: ProxyMetrics, endpoint: str, started_s: float) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._previous_s = started_s
        self._is_first = True

    def tick(self) -> None:
        now_s = time.monotonic()
        elapsed_s, self._previous_s = now_s - self._previous_s, now_s
        if self._is_first:
            self._metrics.time_to_first_token.labels(self._endpoint).observe(elapsed_s)
            self._is_first = False
        else:
            self._metrics.inter_token.observe(elapsed_s)


class Choice:
    """The sink of one choice's tokens: text, counts, and whom to give the text to."""

    def __init__(self, text: TextStream, clock: ChoiceClock, out: "ChoiceOutput") -> None:
        self._text = text
        self._clock = clock
        self._out = out
        self._num_cached_tokens: int | None = None

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
        delta = self._text.push(batch.tokens, batch.finish_reason)
        self._out.write(delta)
        return delta.finish_reason is None


class ChoiceOutput(Protocol):
    def write(self, delta: TextDelta) -> None: ...


class StreamedChoice:
    """Writes each delta to the client at once."""

    def __init__(self, index: int, client: Client, builder: ResponseBuilder, with_logprobs: bool) -> None:
        self._index = index
        self._client = client
        self._builder = builder
        self._with_logprobs = with_logprobs
        self._is_first = True

    def write(self, delta: TextDelta) -> None:
        events = self._text_event(delta)
        if delta.finish_reason is not None:
            events += self._builder.finish_chunk(self._index, delta.finish_reason)
        if events:
            self._client.send_events(events)

    def _text_event(self, delta: TextDelta) -> bytes:
        logprobs = delta.logprobs if self._with_logprobs else None
        if self._is_first:
            self._is_first = False
            return self._builder.first_chunk(self._index, delta.text, logprobs)
        if delta.text or delta.logprobs:
            return self._builder.text_chunk(self._index, delta.text, logprobs)
        return b""


class WholeChoice:
    """Keeps everything until the choice is finished."""

    def __init__(self, with_logprobs: bool) -> None:
        self._texts: list[str] = []
        self._logprobs: list[TokenText] = []
        self._with_logprobs = with_logprobs
        self._finish_reason: str | None = None

    def write(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason

    def answer(self) -> Answer:
        assert self._finish_reason is not None
        logprobs = self._logprobs if self._with_logprobs else None
        return Answer("".join(self._texts), self._finish_reason, logprobs)


class AnswerShape(Protocol):
    def choice_output(self, index: int) -> ChoiceOutput: ...

    async def finish(self, usage: Usage) -> None: ...


class StreamedAnswer:
    def __init__(
        self, client: Client, builder: ResponseBuilder, *, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._client = client
        self._builder = builder
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage

    def choice_output(self, index: int) -> ChoiceOutput:
        return StreamedChoice(index, self._client, self._builder, self._with_logprobs)

    async def finish(self, usage: Usage) -> None:
        usage_event = self._builder.usage_chunk(usage) if self._include_usage else b""
        await self._client.end_events(usage_event + DONE)


class WholeAnswer:
    def __init__(self, client: Client, builder: ResponseBuilder, *, with_logprobs: bool) -> None:
        self._client = client
        self._builder = builder
        self._with_logprobs = with_logprobs
        self._choices: list[WholeChoice] = []

    def choice_output(self, index: int) -> ChoiceOutput:
        assert index == len(self._choices)
        self._choices.append(WholeChoice(self._with_logprobs))
        return self._choices[index]

    async def finish(self, usage: Usage) -> None:
        answers = [choice.answer() for choice in self._choices]
        await self._client.send_json(200, self._builder.whole(answers, usage))
