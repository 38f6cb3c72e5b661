"""Two engines as they are assembled from their configuration, over real transports: a chat of two turns."""

import random
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.assembly import build_engine
from engine.config import EngineConfig
from engine.ipc import AddRequest
from tests.engine.pair import greedy, tiny_checkpoint
from tests.kv_transfer.processes import needs_nixl
from wire.services import EngineRole, PromptEngineAddress

BLOCK_SIZE = 4
NUM_OUTPUT = 16


class Assembled:
    """One engine and the tokens it has answered with."""

    def __init__(self, role: EngineRole, checkpoint: Path, transport: str, wake: threading.Event) -> None:
        config = EngineConfig(
            role=role,
            engine_id=role,
            epoch=1,
            model=str(checkpoint),
            dtype="fp32",
            block_size=BLOCK_SIZE,
            kv_bytes=4 << 20,
            max_model_len=200,
            max_num_batched_tokens=8,
            transport=transport,
            pull_back_min_tokens=8,
            pull_back_wait_s=20.0,
            peak_gflops=1.0,
            command_endpoint="",
            event_endpoint="",
        )
        self.role = role
        self.engine, self.ready = build_engine(config, wake.set, lambda stage, fraction: None)
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    @property
    def address(self) -> PromptEngineAddress:
        assert self.ready.control_address is not None
        return PromptEngineAddress(engine_id=self.role, epoch=1, control_address=self.ready.control_address)

    def turn(self) -> None:
        outputs = list(self.engine.poll())
        if self.engine.has_work:
            outputs += self.engine.step()
        for output in outputs:
            assert output.failure is None, output.failure
            self.tokens.setdefault(output.request_id, []).extend(t.token_id for t in output.tokens)
            if output.is_last:
                self.ended.add(output.request_id)

    def counter(self, name: str) -> int:
        return int(self.engine.stats().transfer[name])


def ask(prompt: Assembled, completion: Assembled, request_id: str, tokens: list[int]) -> list[int]:
    request = AddRequest(
        request_id=request_id,
        prompt_token_ids=tuple(tokens),
        sampling=greedy(NUM_OUTPUT),
        handover_id=f"handover-{request_id}",
        prompt_engine=prompt.address,
        previous_engine=completion.address,
    )
    for each in (prompt, completion):
        each.engine.add(request)
    deadline_s = time.monotonic() + 60
    while request_id not in completion.ended:
        assert time.monotonic() < deadline_s, "no answer within 60 s"
        prompt.turn()
        completion.turn()
    return prompt.tokens[request_id] + completion.tokens[request_id]


@pytest.mark.parametrize("transport", ["zmq", pytest.param("nixl", marks=needs_nixl)])
def test_both_engines_read_from_each_other(tmp_path: Path, transport: str) -> None:
    checkpoint, wake = tiny_checkpoint(tmp_path), threading.Event()
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    prompt = Assembled("prompt", checkpoint, transport, wake)
    completion = Assembled("completion", checkpoint, transport, wake)
    try:
        chance = random.Random(0)
        first = [chance.randrange(3, 128) for _ in range(37)]
        second = first + ask(prompt, completion, "first", first) + [5, 6, 7]
        answer = ask(prompt, completion, "second", second)
        assert prompt.counter("pull_back_tokens") == (len(second) - 4) // 4 * 4 - 36
        assert completion.counter("blocks_skipped") == (len(second) - 4) // 4
        cold = Assembled("prompt", checkpoint, transport, wake)
        try:
            assert ask(cold, completion, "cold", second) == answer
        finally:
            cold.engine.close()
    finally:
        completion.engine.close()
        prompt.engine.close()
