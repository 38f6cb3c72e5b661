"""Whole services whose engines are shared out to unequally many processes answer as one process does."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.engine.builders import save_tiny_model
from tests.engine.grammar_tokenizer import text_of, tiny_tokenizer
from tests.engine.pair import greedy, run_normal
from tests.system.processes import RunningStack, ServiceProcess, eventually

pytestmark = pytest.mark.system

NUM_TOKENS = 16
PROMPTS = {
    "short": [5, 9, 70, 33, 4],
    "blocks": list(range(20, 52)),
    "long": [3 + (7 * i + i * i) % 120 for i in range(90)],
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


NUM_RANKS = {"prompt": 2, "completion": 1}
"""Each rank of the prompt engine has one of the two KV heads. Other numbers: tests/engine/tensor_parallel."""


@dataclass(frozen=True, slots=True)
class Served:
    checkpoint: Path
    stack: RunningStack


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = tmp_path_factory.mktemp("tiny")
    save_tiny_model(checkpoint, "Llama", max_position_embeddings=256)
    tiny_tokenizer().save(str(checkpoint / "tokenizer.json"))
    with RunningStack(
        model=str(checkpoint),
        dtype="fp32",
        kv_bytes=4 << 20,
        block_size=4,
        max_num_batched_tokens=32,
        verify_kv=True,
        extra={role: ["--tp", str(number)] for role, number in NUM_RANKS.items()},
    ) as stack:
        yield Served(checkpoint, stack)


def num_processes(service: ServiceProcess) -> int:
    """That compute the model."""
    return 1 + len(service.engine_process().children())


def complete(client: openai.OpenAI, served: Served, prompt: list[int], **options: Any) -> str:
    answer = client.completions.create(model=served.checkpoint.name, prompt=prompt, **options)
    return answer.choices[0].text


def test_prompts_at_once_are_answered_as_one_process_does(served: Served) -> None:
    for role, number in NUM_RANKS.items():
        assert num_processes(served.stack.services[role]) == number
    answers = run_normal(served.checkpoint, PROMPTS, greedy(NUM_TOKENS))
    with served.stack.client() as client, ThreadPoolExecutor(3) as pool:
        texts = pool.map(
            lambda prompt: complete(
                client, served, prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            ),
            PROMPTS.values(),
        )
        assert list(texts) == [text_of(token_ids) for token_ids in answers.values()]
    arrived = partial(served.stack.completion.metric, "tandem_transfer_arrived_total")
    eventually(lambda: arrived() == len(PROMPTS), "every prompt is counted as handed over")
    served.stack.wait_until_nothing_is_pinned()


def test_an_answer_fits_its_schema(served: Served) -> None:
    """The first token is drawn by the prompt engine's rank 0, the others by the completion engine's."""
    with served.stack.client() as client:
        texts = [
            complete(
                client,
                served,
                PROMPTS["blocks"],
                max_tokens=60,
                seed=seed,
                extra_body={"guided_json": SCHEMA},
            )
            for seed in (1, 2, 3)
        ]
    validator = jsonschema_rs.Draft202012Validator(SCHEMA)
    for text in texts:
        validator.validate(json.loads(text))
