"""How much this proxy has given each engine to do."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from proxy.fleet import Engine

STREAM_TOKENS = 64
"""What a stream weighs at the engine that decodes it, beside the tokens it brings along."""


class EngineLoads:
    """Tokens of open legs by engine; owned by those who make the calls."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    @property
    def num_queued_tokens(self) -> Mapping[str, int]:
        return self._tokens

    @contextmanager
    def on(self, engine: Engine, num_tokens: int) -> Iterator[None]:
        self.add(engine, num_tokens)
        try:
            yield
        finally:
            self.take_off(engine, num_tokens)

    def add(self, engine: Engine, num_tokens: int) -> None:
        self._tokens[engine.url] = self._tokens.get(engine.url, 0) + num_tokens

    def take_off(self, engine: Engine, num_tokens: int) -> None:
        num_left = self._tokens[engine.url] - num_tokens
        if num_left:
            self._tokens[engine.url] = num_left
        else:
            del self._tokens[engine.url]  # engines come and go, and their addresses with them

    def check_invariants(self) -> None:
        """Once nothing is open, nothing is counted."""
        assert not self._tokens, self._tokens
