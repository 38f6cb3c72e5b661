"""Log probabilities of a prompt's own tokens: those of the model, however the prompt comes to be computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode

from engine.assembly import scheduler_config
from engine.config import EngineConfig
from engine.ipc import AddRequest, RequestOutput
from engine.prompt_logprobs import LOGITS_BYTES, judge, max_scored_tokens
from tests.engine.pair import TestEngine, tiny_checkpoint
from tests.engine.tiny_engine import DirectPair, TinyModel, normal_engine
from wire.sampling import SamplingParams
from wire.services import PromptLogprobs

LONG = tuple(3 + (5 * i + i * i) % 120 for i in range(30))
"""Four chunks."""
PROMPTS = {"long": LONG, "whole chunks": LONG[:16], "one over": LONG[:9], "short": (7, 8), "one": (9,)}
ASKING = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> TinyModel:
    return TinyModel.load(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, torch.Tensor]:
    """transformers' log probabilities behind every token of each prompt, [tokens, vocab]."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return {
            name: reference(torch.tensor([ids])).logits[0].log_softmax(-1) for name, ids in PROMPTS.items()
        }


def message(name: str, sampling: SamplingParams = ASKING, n: int = 1) -> AddRequest:
    return AddRequest(request_id=name, prompt_token_ids=PROMPTS[name], sampling=sampling, num_completions=n)


class Reports:
    """What engines say of prompts; keeps every report."""

    def __init__(self, *engines: TestEngine) -> None:
        self.outputs: list[RequestOutput] = []
        for side in engines:
            self._listen(side)

    def _listen(self, side: TestEngine) -> None:
        step = side.engine.step

        def listening() -> list[RequestOutput]:
            outputs = step()
            self.outputs += [output for output in outputs if output.prompt_logprobs is not None]
            return outputs

        side.engine.step = listening  # type: ignore[method-assign]

    def of(self, name: str) -> PromptLogprobs:
        """Said once."""
        (output,) = (output for output in self.outputs if output.request_id == name)
        assert output.tokens[0].index == 0
        assert output.prompt_logprobs is not None
        return output.prompt_logprobs


def assert_judged(
    got: PromptLogprobs, name: str, expected: dict[str, torch.Tensor], num_top: int = 3
) -> None:
    ids = PROMPTS[name]
    assert len(got) == len(ids) - 1
    for place, judged in enumerate(got):
        logprobs = expected[name][place]
        best = logprobs.topk(num_top)
        assert judged.logprob == pytest.approx(float(logprobs[ids[place + 1]]), abs=2e-5)
        assert judged.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-5)
        assert list(judged.top_token_ids) == best.indices.tolist()


def run_all(engine: TestEngine, *requests: AddRequest) -> Reports:
    reports = Reports(engine)
    for request in requests:
        engine.engine.add(request)
    while not all(engine.has_ended(request.request_id) for request in requests):
        engine.turn()
    return reports


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_in_chunks_and_in_one_batch(
    model: TinyModel, expected: dict[str, torch.Tensor], overlap: bool
) -> None:
    engine = normal_engine(model.runner(96), overlap=overlap)
    plain = AddRequest(
        request_id="plain", prompt_token_ids=LONG[:7], sampling=replace(ASKING, prompt_logprobs=None)
    )
    reports = run_all(engine, *map(message, PROMPTS), plain)
    for name in PROMPTS:
        assert_judged(reports.of(name), name, expected)
    assert all(output.request_id != "plain" for output in reports.outputs)
    assert engine.answers["long"].token_ids == run_all_answers(model, "long")
    engine.engine.close()


def run_all_answers(model: TinyModel, name: str) -> list[int]:
    """What the request is answered without asking for its prompt."""
    engine = normal_engine(model.runner(96))
    run_all(engine, message(name, replace(ASKING, prompt_logprobs=None)))
    return engine.answers[name].token_ids


def test_the_pair_reports_them_with_the_first_token(
    model: TinyModel, expected: dict[str, torch.Tensor]
) -> None:
    pair = DirectPair(model.runner(96), model.runner(96), overlap=False)
    reports = Reports(*pair.engines)
    for name in PROMPTS:
        pair.add(message(name))
    while not pair.is_drained:
        pair.turn()
    for name in PROMPTS:
        assert_judged(reports.of(name), name, expected)
        assert pair.answer(name).indices == [0, 1, 2, 3]


def test_a_cached_prompt_is_computed_again_where_it_is_to_be_judged(
    model: TinyModel, expected: dict[str, torch.Tensor]
) -> None:
    engine = normal_engine(model.runner(96), prefix_cache=True)
    run_all(engine, replace_id(message("long", replace(ASKING, prompt_logprobs=None)), "before"))
    reports = run_all(engine, message("long"))
    assert_judged(reports.of("long"), "long", expected)
    assert engine.num_cached["long"] == 0
    run_all(engine, replace_id(message("long", replace(ASKING, prompt_logprobs=None)), "after"))
    assert engine.num_cached["after"] == 28


def replace_id(request: AddRequest, request_id: str) -> AddRequest:
    return AddRequest(
        request_id=request_id, prompt_token_ids=request.prompt_token_ids, sampling=request.sampling
    )


def test_every_choice_bears_those_of_its_prompt(model: TinyModel, expected: dict[str, torch.Tensor]) -> None:
    engine = normal_engine(model.runner(96))
    reports = run_all(engine, message("long", replace(ASKING, temperature=1.0, prompt_logprobs=0), n=3))
    assert sorted(output.choice for output in reports.outputs) == [0, 1, 2]
    for output in reports.outputs:
        assert output.prompt_logprobs is not None
        assert_judged(output.prompt_logprobs, "long", expected, num_top=0)


def test_one_that_was_preempted_says_nothing_twice(
    model: TinyModel, expected: dict[str, torch.Tensor]
) -> None:
    """Computed again after its first token, it has said everything."""
    engine = normal_engine(
        model.runner(96), stop_preempted_request=False, retract_cheapest=True, test_retract_interval=2
    )
    names = ["long", "whole chunks", "one over"]
    reports = run_all(engine, *(message(name, replace(ASKING, max_tokens=12)) for name in names))
    assert engine.engine.stats().num_prompt_tokens > sum(len(PROMPTS[name]) for name in names)
    for name in names:
        assert_judged(reports.of(name), name, expected)


def test_a_completion_that_goes_on_elsewhere_does_not_repeat_them(model: TinyModel) -> None:
    engine = normal_engine(model.runner(96))
    request = AddRequest(request_id="again", prompt_token_ids=LONG, sampling=ASKING, num_replayed_tokens=2)
    assert run_all(engine, request).outputs == []


def test_logits_are_judged_where_they_are() -> None:
    """Stand-ins for tensors of a GPU, which refuse to be mixed with those of the host."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(70, 90, device="cuda")
        judged = judge(logits, np.zeros(70, np.int64), 3)
    assert [tensor.device.type for tensor in judged] == ["cuda"] * 3
    assert [tuple(tensor.shape) for tensor in judged] == [(70,), (70, 3), (70, 3)]


def test_an_engine_bounds_the_logits_that_a_step_keeps(model: TinyModel) -> None:
    runner = model.runner(96)
    config = EngineConfig(
        role="normal",
        engine_id="e",
        epoch=1,
        model="tiny",
        max_model_len=32,
        command_endpoint="",
        event_endpoint="",
    )
    row_bytes = 4 * runner.config.vocab_size
    most = scheduler_config(config, runner).max_scored_tokens
    assert most is not None
    assert most * row_bytes <= LOGITS_BYTES < (most + 1) * row_bytes
    assert max_scored_tokens(128_256) == 523
