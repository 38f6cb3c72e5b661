"""What this GPU gives, in one run: our decode and prefill against its own copy bandwidth and matrix rate.

A random-weight Llama of the 8B configuration is built on the device (nothing is loaded), served by a NORMAL
engine, and transformers' own continuous batching gets the same prompts afterwards. `--size tiny --device cpu`
is the smoke test of this very program; its figures mean nothing.

Run it from the repository's root: `PYTHONPATH=. python -m benchmarks.device_check --json device.json`. It
needs torch >= 2.11, transformers >= 5.17, numpy, rich and tokenizers, and of what such an image lacks only
the wheels of msgspec and pyzmq (carry both; nixl, gguf, pydantic and xgrammar are not imported).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.report import Report, argument_parser
from engine.choices import Choices
from engine.decode_graphs import CudaGraphs
from engine.device_runner import DeviceRunner, choose_kernel
from engine.device_sampler import DeviceSampler
from engine.handover_role import NoHandover
from engine.ipc import AddRequest
from engine.kv_pool import KVLayout, KVPool
from engine.llm_engine import LLMEngine
from engine.model.attention_flashinfer import FlashInferKernel
from engine.model.device_llama import DeviceLlama, random_weights
from engine.model.rotary import rotary_table
from engine.model_runner import IntArray, ModelBatch
from model_files import ModelConfig
from shared_scheduler import EngineType, Scheduler, SchedulerConfig
from wire.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
TINY = ModelConfig(
    architecture="llama",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured; tokens unless a name says otherwise."""

    config: ModelConfig
    streams: tuple[int, ...]
    num_prompt: int
    num_output: int
    chunk: int
    block_size: int
    copy_bytes: int
    matrix_width: int


SIZES = {
    "8b": Size(LLAMA_8B, (1, 16, 64), 512, 128, 8192, 32, 4 << 30, 8192),
    "tiny": Size(TINY, (1, 3), 24, 8, 64, 4, 8 << 20, 256),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured on this device, in this run."""

    copy_bytes_per_s: float
    """Read and written together."""
    flops_per_s: float


@dataclass(slots=True)
class Timed:
    """A run of one set of prompts."""

    prefill_s: float = 0.0
    whole_s: float = 0.0
    decode_steps_s: list[float] = field(default_factory=list)
    decode_device_s: list[float] = field(default_factory=list)


def main() -> None:
    arguments = parsed()
    size, device = SIZES[arguments.size], device_of(arguments.device)
    started_s = time.monotonic()
    report = Report(f"device_check: {arguments.size} on {name_of(device)}, torch {torch.__version__}")
    machine = measured(size, device)
    report.add("this device", "copy", machine.copy_bytes_per_s / 1e9, "GB/s")
    report.add("this device", f"bf16 product {size.matrix_width}^3", machine.flops_per_s / 1e12, "TFLOP/s")
    ours = check_engine(size, device, machine, report)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    left_s = arguments.limit_s - (time.monotonic() - started_s)
    if left_s < arguments.peer_s:
        print(f"transformers is left out: {left_s:.0f} s of --limit-s {arguments.limit_s:g} are left")
    else:
        check_transformers(size, device, ours, report)
    report.add("this run", "wall", time.monotonic() - started_s, "s", arguments.limit_s)
    report.finish(arguments.json)


def parsed() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--size", choices=sorted(SIZES), default="8b")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--limit-s", type=float, default=460.0, help="of the whole run")
    parser.add_argument("--peer-s", type=float, default=120.0, help="do not begin with transformers below")
    return parser.parse_args()


def device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"


# The machine


def measured(size: Size, device: torch.device) -> Machine:
    source = torch.zeros(size.copy_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(partial(target.copy_, source), device)
    del source, target
    width = size.matrix_width
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = seconds(lambda: left @ right, device)
    return Machine(size.copy_bytes / copy_s, 2 * width**3 / product_s)


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median time of `work` on the device."""
    for _ in range(3):
        work()
    timed: list[float] = []
    for _ in range(repeats):
        with stopwatch(device, timed):
            work()
    return statistics.median(timed)


@contextmanager
def stopwatch(device: torch.device, into: list[float]) -> Iterator[None]:
    """Seconds from an idle device to an idle device."""
    synchronize(device)
    began_s = time.perf_counter()
    yield
    synchronize(device)
    into.append(time.perf_counter() - began_s)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# Our engine


class TimedRunner(DeviceRunner):
    """Notes how long the device takes for each step's forward; only where `is_timed`, since that waits."""

    is_timed = False
    forward_s: list[float]

    def forward(self, batch: ModelBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        if not self.is_timed:
            return super().forward(batch, logit_rows)
        with stopwatch(self.kv_pool.tensor.device, self.forward_s):
            return super().forward(batch, logit_rows)


def make_runner(size: Size, device: torch.device) -> tuple[TimedRunner, str]:
    config = size.config
    max_model_len = size.num_prompt + size.num_output + size.block_size
    blocks_each = -(-max_model_len // size.block_size)
    pool = KVPool(
        KVLayout.of(config, size.block_size, "bfloat16"),
        2 + max(size.streams) * (blocks_each + 1),
        device=device,
    )
    weights = random_weights(config, rotary_table(config, max_model_len), device, torch.bfloat16)
    kernel, words = choose_kernel(device)
    captures = device.type == "cuda" and not isinstance(kernel, FlashInferKernel)
    runner = TimedRunner(
        DeviceLlama(config, weights),
        pool,
        kernel,
        device=device,
        max_num_seqs=max(size.streams),
        max_model_len=max_model_len,
        graphs=CudaGraphs() if captures else None,
    )
    runner.forward_s = []
    return runner, words


def make_engine(size: Size, runner: DeviceRunner, device: torch.device) -> LLMEngine:
    scheduler = Scheduler(
        SchedulerConfig(
            engine_type=EngineType.NORMAL,
            max_model_len=size.num_prompt + size.num_output,
            max_num_seqs=max(size.streams),
            max_num_batched_tokens=size.chunk,
            block_size=size.block_size,
            num_blocks=runner.kv_pool.num_blocks,
            prefill_attempt_interval=1,
            prefill_any_attempt_interval=1,
            prefix_cache=False,
        )
    )
    role, choices = NoHandover(scheduler), Choices(scheduler)
    return LLMEngine(scheduler, runner, DeviceSampler(device), role, choices=choices)


def prompts_of(size: Size, num_streams: int) -> list[list[int]]:
    chance = np.random.default_rng(num_streams)
    prompts = chance.integers(3, size.config.vocab_size, (num_streams, size.num_prompt))
    return [[int(token) for token in prompt] for prompt in prompts]


def check_engine(
    size: Size, device: torch.device, machine: Machine, report: Report
) -> dict[int, list[list[int]]]:
    """Adds our rows; returns what every set of prompts was answered, by its number of streams."""
    runner, words = make_runner(size, device)
    print(f"attention: {words}")
    engine = make_engine(size, runner, device)
    answers = {}
    for num_streams in size.streams:
        prompts = prompts_of(size, num_streams)
        serve(engine, runner, prompts, size, "warm")  # captures graphs, chooses kernels
        timed, answers[num_streams] = serve(engine, runner, prompts, size, "plain")
        apart, _ = serve(engine, runner, prompts, size, "apart")
        add_rows(report, size, machine, runner, num_streams, timed, apart)
    engine.close()
    return answers


def serve(
    engine: LLMEngine, runner: TimedRunner, prompts: list[list[int]], size: Size, name: str
) -> tuple[Timed, list[list[int]]]:
    """All prompts at once to their last tokens; with the name `apart` the forward is timed by itself."""
    sampling = SamplingParams(max_tokens=size.num_output, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {f"{name}-{i}": [] for i in range(len(prompts))}
    for request_id, prompt in zip(answers, prompts, strict=True):
        engine.add(AddRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))
    timed, num_ended = Timed(), 0
    runner.is_timed = name == "apart"
    began_s = time.perf_counter()
    while num_ended < len(prompts):
        is_decode, step_s = all(answers.values()), time.perf_counter()
        runner.forward_s.clear()
        for output in engine.step():
            answers[output.request_id] += [token.token_id for token in output.tokens]
            num_ended += output.is_last
        now_s = time.perf_counter()
        if is_decode:
            timed.decode_steps_s.append(now_s - step_s)
            timed.decode_device_s += runner.forward_s
        elif all(answers.values()):
            timed.prefill_s = now_s - began_s
    timed.whole_s = time.perf_counter() - began_s
    return timed, list(answers.values())


def add_rows(
    report: Report,
    size: Size,
    machine: Machine,
    runner: TimedRunner,
    num_streams: int,
    timed: Timed,
    apart: Timed,
) -> None:
    case, config = f"tandem, {num_streams} streams", size.config
    num_prompt_tokens = num_streams * size.num_prompt
    prefill_flops = num_prompt_tokens * flops_per_token(config, size.num_prompt / 2)
    report.add(case, "prefill", num_prompt_tokens / timed.prefill_s, "tokens/s")
    rate = prefill_flops / timed.prefill_s
    report.add(case, "prefill", rate / 1e12, "TFLOP/s", machine.flops_per_s / 1e12)
    step_s = statistics.median(timed.decode_steps_s)
    report.add(case, "decode", num_streams / step_s, "tokens/s")
    context = size.num_prompt + size.num_output / 2
    kv_bytes = num_streams * context * runner.kv_pool.block_bytes / size.block_size
    read = (runner.model.num_weight_bytes + kv_bytes) / step_s
    # A copy moves each byte twice, a step reads it once: both are counted as the memory sees them.
    report.add(case, "decode reads", read / 1e9, "GB/s", machine.copy_bytes_per_s / 1e9)
    device_s = statistics.median(apart.decode_device_s)
    report.add(case, "decode step", step_s * 1e3, "ms", device_s * 1e3)
    report.add(case, "host overhead of a decode step", (step_s - device_s) * 1e3, "ms", step_s * 1e3)
    report.add(case, "whole", num_streams * size.num_output / timed.whole_s, "output tokens/s")


def flops_per_token(config: ModelConfig, mean_context: float) -> float:
    """Of a prompt's token: two for each weight of the layers, and attention; the head is left out."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    return config.num_layers * (2 * weights + 4 * mean_context * heads)


# transformers on the same prompts


def check_transformers(
    size: Size, device: torch.device, ours: dict[int, list[list[int]]], report: Report
) -> None:
    """Its continuous batching, with weights drawn anew: the same work, other tokens."""
    model = transformers_model(size.config, device)
    for num_streams in size.streams:
        prompts = prompts_of(size, num_streams)
        generate_batch(model, prompts, size)  # captures graphs, chooses kernels
        timed: list[float] = []
        with stopwatch(device, timed):
            num_tokens = generate_batch(model, prompts, size)
        baseline = float(num_tokens / timed[0])
        report.add(f"transformers, {num_streams} streams", "whole", baseline, "output tokens/s")
        expected = sum(map(len, ours[num_streams]))
        report.add(f"transformers, {num_streams} streams", "tokens", num_tokens, "", expected)
        mine = next(
            row.value
            for row in report.rows
            if row.case == f"tandem, {num_streams} streams" and row.metric == "whole"
        )
        report.add(
            f"tandem, {num_streams} streams", "against transformers", mine, "output tokens/s", baseline
        )


def transformers_model(config: ModelConfig, device: torch.device) -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        attn_implementation="sdpa",
        eos_token_id=None,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: PreTrainedModel = LlamaForCausalLM(shape).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def generate_batch(model: "PreTrainedModel", prompts: list[list[int]], size: Size) -> int:
    """How many tokens all answers have."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    how = GenerationConfig(max_new_tokens=size.num_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = None
    if model.device.type == "cpu":  # it would take, and clear, most of this machine's memory for its cache
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    outputs = model.generate_batch(
        inputs=prompts, generation_config=how, continuous_batching_config=batching, progress_bar=False
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


if __name__ == "__main__":
    main()
