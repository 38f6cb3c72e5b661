"""What a completion engine streams, passed on to the sinks of its choices."""

from collections.abc import Iterable, Mapping

from proxy.errors import EngineBroke
from proxy.fleet import Engine
from proxy.leg_batch import CompletionLeg, LegBatch
from proxy.legs import check_prompt_logprobs
from proxy.native.loading import PlainStream
from proxy.token_batch import TokenBatch, TokenSink
from wire.services import CompletionRequest, OutputToken


class Relay:
    """Passes a completion stream's tokens on to the sinks of its choices, each in order of index."""

    def __init__(
        self,
        engine: Engine,
        served: Iterable[int],
        sinks: Mapping[int, TokenSink],
        *,
        next_index: int,
        prefilled: CompletionRequest | None = None,
    ) -> None:
        """`served`: the choices that the engine generates; `sinks`: of those that want more.

        `prefilled`: what the engine was asked, where it has computed the prompt, too.
        """
        self._engine = engine
        asks_for_logprobs = prefilled is not None and prefilled.sampling.prompt_logprobs is not None
        self._prefilled = prefilled if asks_for_logprobs else None
        self._sinks = dict(sinks)
        self._next_index = dict.fromkeys(served, next_index)
        """Of the choices whose end the engine has not told."""

    async def run(self, leg: CompletionLeg, first: LegBatch, stall_s: float) -> None:
        """Until every choice has ended, or its sink wants no more."""
        if self._take(first):
            await leg.forward(self._take, stall_s, self)
        if not self._next_index:
            await leg.drain()

    def _take(self, batch: LegBatch) -> bool:
        for choice, part in batch.parts.items():
            if len(part.tokens) == 1 and part.finish_reason is None and self._prefilled is None:
                # As nearly always: the next token of a choice that goes on.
                index, sink = part.tokens[0].index, self._sinks.get(choice)
                if sink is not None and index == self._next_index.get(choice):
                    self._next_index[choice] = index + 1
                    if not sink.accept(part):
                        del self._sinks[choice]
                    continue
            self._pass_on(choice, part)
        if not self._sinks:
            return False
        if batch.failure is not None:
            raise batch.failure
        return True

    def begin_plain(self) -> PlainStream | None:
        """What can take the next tokens: of the one choice that is left, if they are nothing but text."""
        if len(self._next_index) != 1 or self._prefilled is not None:
            return None
        ((choice, next_index),) = self._next_index.items()
        sink = self._sinks.get(choice)
        return None if sink is None else sink.begin_plain(choice, next_index)

    def end_plain(self, plain: PlainStream) -> None:
        """`plain` takes no more."""
        ((choice, _),) = self._next_index.items()
        self._next_index[choice] = plain.next_index
        self._sinks[choice].end_plain(plain)

    def _pass_on(self, choice: int, part: TokenBatch) -> None:
        if choice not in self._next_index:
            raise EngineBroke(
                self._engine.role, f"the engine sent tokens of choice {choice}, which is not due"
            )
        if self._prefilled is not None and part.tokens and self._next_index[choice] == 0:
            check_prompt_logprobs(self._engine, self._prefilled, part.prompt_logprobs)
        tokens = _in_order(self._engine, part.tokens, self._next_index[choice])
        self._next_index[choice] += len(tokens)
        if part.finish_reason is not None:
            del self._next_index[choice]
        sink = self._sinks.get(choice)
        if sink is None or not (tokens or part.finish_reason is not None):
            return
        wants_more = sink.accept(
            TokenBatch(tokens, part.finish_reason, part.num_cached_tokens, part.prompt_logprobs)
        )
        if part.finish_reason is not None or not wants_more:
            del self._sinks[choice]


def _in_order(engine: Engine, tokens: tuple[OutputToken, ...], next_index: int) -> tuple[OutputToken, ...]:
    """The tokens that were not seen yet; a gap means the engine lost some."""
    fresh: list[OutputToken] = []
    for token in tokens:
        if token.index < next_index + len(fresh):
            continue
        if token.index > next_index + len(fresh):
            raise EngineBroke(
                engine.role,
                f"the engine sent token {token.index} where token {next_index + len(fresh)} was due",
            )
        fresh.append(token)
    return tuple(fresh)
