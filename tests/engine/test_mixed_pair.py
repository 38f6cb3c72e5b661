"""Sixteen mixed requests at once through a real pair of engines get what each gets alone, in fp32."""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import KernelChoice
from engine.ipc import AddRequest
from tests.engine.builders import save_tiny_model
from tests.engine.grammar_tokenizer import tiny_tokenizer
from tests.engine.native_build import require_kernels
from tests.engine.tensor_parallel.engines import DEADLINE_S, Engine, engine
from tests.engine.test_mixed_requests import messages
from wire.services import OutputToken, PromptEngineAddress

Tokens = dict[str, list[OutputToken]]
"""By request and choice."""


@dataclass(frozen=True, slots=True)
class Alone:
    checkpoint: Path
    kernels: KernelChoice
    answers: Tokens


@pytest.fixture(scope="module", params=["native", "torch"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Every request by itself in one NORMAL engine that remembers nothing of the others."""
    if request.param == "native":
        require_kernels()
    checkpoint = tmp_path_factory.mktemp("tiny")
    save_tiny_model(checkpoint, "Llama", max_position_embeddings=256)
    tiny_tokenizer().save(str(checkpoint / "tokenizer.json"))
    answers: Tokens = {}
    with engine(checkpoint, kernels=request.param, prefix_cache=False) as normal:
        assert normal.ready.kernels == request.param
        for message in messages():
            normal.engine.add(message)
            normal.run_until_ended(*names_of(message))
            answers |= {name: normal.answers[name].tokens for name in names_of(message)}
    return Alone(checkpoint, request.param, answers)


def names_of(message: AddRequest) -> list[str]:
    return [f"{message.request_id}/{choice}" for choice in range(message.num_completions)]


def run_pair(prompt: Engine, completion: Engine) -> Tokens:
    """All requests at once; both engines' outputs of each choice as one answer."""
    address = PromptEngineAddress(
        engine_id="prompt", epoch=1, control_address=prompt.ready.control_address or ""
    )
    names = [name for message in messages() for name in names_of(message)]
    for message in messages():
        handover = f"handover-{message.request_id}"
        for side in (prompt, completion):
            side.engine.add(msgspec.structs.replace(message, handover_id=handover, prompt_engine=address))
    until_s = time.monotonic() + DEADLINE_S
    while not all(has_ended(name, prompt, completion) for name in names):
        assert time.monotonic() < until_s, (prompt.answers, completion.answers)
        prompt.turn()
        completion.turn()
    return {
        name: [
            token for side in (prompt, completion) if name in side.answers
            for token in side.answers[name].tokens
        ]
        for name in names
    }  # fmt: skip


def has_ended(name: str, *sides: Engine) -> bool:
    return any(name in side.answers and side.answers[name].end is not None for side in sides)


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_a_batch_of_sixteen_gets_what_each_request_gets_alone(alone: Alone, speculative: str) -> None:
    options = {"kernels": alone.kernels, "transport": "zmq", "max_num_seqs": 24}
    with (
        engine(alone.checkpoint, role="prompt", engine_id="prompt", **options) as prompt,
        engine(
            alone.checkpoint, role="completion", engine_id="completion", speculative=speculative, **options
        ) as completion,
    ):
        answers = run_pair(prompt, completion)
        assert completion.engine.stats().transfer["blocks_read"] > 0
    if alone.kernels == "native":  # the same bits, logprobs included
        assert answers == alone.answers
    for name, tokens in alone.answers.items():
        assert [token.token_id for token in answers[name]] == [token.token_id for token in tokens], name
        torch.testing.assert_close(logprobs_of(answers[name]), logprobs_of(tokens), rtol=1e-4, atol=1e-4)


def logprobs_of(tokens: list[OutputToken]) -> torch.Tensor:
    return torch.tensor([0.0 if token.logprobs is None else token.logprobs.logprob for token in tokens])
