"""Engines of several processes as they are built from their configuration, and what they answer."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.assembly import build_engine
from engine.config import EngineConfig
from engine.ipc import AddRequest
from engine.llm_engine import LLMEngine
from tests.engine.builders import save_tiny_model
from tests.engine.pair import Answer
from wire.sampling import SamplingParams

DEADLINE_S = 60.0


def tiny_checkpoint(path: Path, family: str, **options: object) -> Path:
    """A random checkpoint with a tokenizer that nobody reads."""
    save_tiny_model(path, family, max_position_embeddings=256, **options)
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(path / "tokenizer.json"))
    return path


class Engine:
    """One engine from its configuration, and what it has answered."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        self.woken = threading.Event()
        config = EngineConfig(
            **{
                "role": "normal",
                "engine_id": "tp",
                "epoch": 1,
                "model": str(model),
                "dtype": "fp32",
                "block_size": 4,
                "kv_bytes": 4 << 20,
                "max_num_batched_tokens": 8,
                "peak_gflops": 1.0,
                "command_endpoint": "",
                "event_endpoint": "",
                **options,
            }
        )
        config.check()
        self.engine: LLMEngine
        self.engine, self.ready = build_engine(config, self.woken.set, lambda _stage, _fraction: None)
        self.answers: dict[str, Answer] = {}

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams, **fields: Any) -> None:
        self.engine.add(
            AddRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling, **fields)
        )

    def turn(self) -> None:
        outputs = list(self.engine.poll())
        if self.engine.takes_step():
            outputs += self.engine.step()
        for output in outputs:
            assert output.failure is None, output.failure
            self.answers.setdefault(f"{output.request_id}/{output.choice}", Answer()).take(output)

    def run_until_ended(self, *names: str) -> dict[str, list[int]]:
        until_s = time.monotonic() + DEADLINE_S
        while not all(name in self.answers and self.answers[name].end for name in names):
            assert time.monotonic() < until_s, self.answers
            self.turn()
        return {name: self.answers[name].token_ids for name in names}


@contextmanager
def engine(model: Path | str, **options: Any) -> Iterator[Engine]:
    one = Engine(model, **options)
    try:
        yield one
    finally:
        one.engine.close()


def turn_both_until(prompt: Engine, completion: Engine, name: str) -> None:
    """Until the completion engine has ended what `name` is."""
    until_s = time.monotonic() + DEADLINE_S
    while not (name in completion.answers and completion.answers[name].end):
        assert time.monotonic() < until_s, (prompt.answers, completion.answers)
        prompt.turn()
        completion.turn()
