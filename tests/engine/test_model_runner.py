import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import KVPoolError, WeightFormatError
from engine.model_runner import Runner, load_model_runner
from model_files import EMBEDDED_MODEL, ModelFiles, ModelFilesError, resolve_model
from processes.heap import keep_freed_memory
from tests.engine.builders import StepOf, batch_of, save_tiny_model
from tests.engine.native_build import require_kernels
from tests.engine.reference import first_difference, reference_generate

BLOCK_SIZE, CHUNK = 32, 40
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):\n    ",
    "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "List three uses of copper. " * 8,
    "1 + 1 =",
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(EMBEDDED_MODEL)


@pytest.fixture(
    scope="module", params=["fp32 torch", "fp16w torch", "fp32 native", "fp16w native", "q4 native"]
)
def runner(files: ModelFiles, request: pytest.FixtureRequest) -> Runner:
    weight_format, kernels = request.param.split()
    if kernels == "native":
        require_kernels()
    return load_model_runner(
        files, weight_format=weight_format, kv_bytes=1 << 28, max_model_len=1024, kernels=kernels
    )


def prompts_of(files: ModelFiles) -> list[list[int]]:
    tokenizer = files.tokenizer()
    texts = (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS)
    return [tokenizer.encode(text).ids for text in texts]


def generate_together(runner: Runner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens: prompts chunk by chunk one after the other, then all sequences decode in one batch."""
    width = runner.kv_pool.num_blocks // len(prompts) - 1
    tables = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(len(prompts))]
    sequences = [list(prompt) for prompt in prompts]
    last_logits = []
    for sequence, table in zip(sequences, tables, strict=True):
        for start in range(0, len(sequence), CHUNK):
            step = StepOf(sequence[: start + CHUNK], start, table)
            logits = runner.forward(batch_of(step, block_size=BLOCK_SIZE))
        last_logits.append(logits)
    logits = torch.cat(last_logits)
    for _ in range(num_tokens):
        for sequence, token_id in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.append(token_id)
        steps = [StepOf(s, len(s) - 1, table) for s, table in zip(sequences, tables, strict=True)]
        logits = runner.forward(batch_of(*steps, block_size=BLOCK_SIZE))
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def test_the_embedded_model_answers_greedily_like_transformers_in_fp32(
    files: ModelFiles, runner: Runner
) -> None:
    prompts = prompts_of(files)
    answers = generate_together(runner, prompts, 24)
    differences = [first_difference(files, p, a) for p, a in zip(prompts, answers, strict=True)]
    assert differences == [None] * len(prompts)


def test_the_reference_by_one_pass_agrees_with_generate(files: ModelFiles) -> None:
    prompt = prompts_of(files)[0]
    answer = reference_generate(files, prompt, 16)
    assert first_difference(files, prompt, answer) is None
    assert first_difference(files, prompt, [*answer[:3], 5, *answer[4:]]) == 3
    assert "Paris" in files.tokenizer().decode(answer)


def test_unknown_weight_format_names_the_option(files: ModelFiles) -> None:
    with pytest.raises(WeightFormatError, match=r"--dtype must be one of fp16w, fp32, q4, got 'int3'"):
        load_model_runner(files, weight_format="int3")


def test_a_weight_too_large_for_float16_names_the_option(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "Llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 1e5
    model.save_pretrained(tmp_path)
    with pytest.raises(WeightFormatError, match="--dtype fp32"):
        load_model_runner(resolve_model(str(tmp_path)), kv_bytes=1 << 24)


def test_missing_layers_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 500'))
    with pytest.raises(ModelFilesError, match="500 layers"):
        load_model_runner(resolve_model(str(tmp_path)), kv_bytes=1 << 24)


def test_a_pool_too_small_is_refused_before_the_weights_are_read(files: ModelFiles) -> None:
    with pytest.raises(KVPoolError, match="raise --kv-bytes"):
        load_model_runner(files, kv_bytes=1000)


def test_importing_the_engine_package_imports_no_torch() -> None:
    code = "import engine, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_model_runner_needs_no_transformers() -> None:
    code = "import engine.model_runner, engine.sampler, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_keeping_freed_memory_can_be_asked_for_twice() -> None:
    keep_freed_memory()
    keep_freed_memory()
