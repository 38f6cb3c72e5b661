"""One NORMAL engine without HTTP: prefill and decode rates, and what share of this machine they use.

`python -m benchmarks.engine [--json FILE]`. All streams come at once, each with its own prompt; whole engine
steps (scheduler, model, sampler), in this process. `roofline` is the time that the measured memory bandwidth
and matrix rate allow a step at best, over the time it took. Run it with the machine to itself.
"""

import argparse
import random
import time
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.report import Report, argument_parser
from benchmarks.roofline import Machine, least_step_s, measure
from engine.assembly import build_engine
from engine.config import EngineConfig, KernelChoice
from engine.ipc import AddRequest
from engine.llm_engine import LLMEngine
from model_files import ModelConfig, resolve_model
from wire.sampling import SamplingParams

STREAMS = (1, 4, 16, 32, 64)
KERNELS: tuple[KernelChoice, ...] = ("native", "torch")


@dataclass(frozen=True, slots=True)
class Load:
    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """When things happened, in seconds after the requests came."""

    first_token_s: tuple[float, ...]
    """Of each stream."""
    step_s: tuple[float, ...]
    """Steps in which every stream got a token."""

    @property
    def prefill_s(self) -> float:
        return max(self.first_token_s)


def main() -> None:
    parser = argument_parser("Prefill and decode rates of an engine beside what the machine could do")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--dtypes", nargs="+", default=["fp16w"], choices=("fp16w", "fp32"))
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--overlap", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    machine = measure()
    report = Report("engine", is_printed_at_once=True)
    report.add("machine", "memory read", machine.bytes_per_s / 1e9, "GB/s")
    report.add("machine", "float32 product", machine.flops / 1e9, "GFLOP/s")
    for dtype in arguments.dtypes:
        compare_kernels(report, machine, arguments, dtype)
    report.finish(arguments.json)


def compare_kernels(report: Report, machine: Machine, arguments: argparse.Namespace, dtype: str) -> None:
    """Kernels take turns load by load; the last of them is the baseline of the others."""
    config = resolve_model(arguments.model).config()
    engines = {kernels: make_engine(arguments, dtype, kernels) for kernels in arguments.kernels}
    for engine in engines.values():
        run(engine, Load(2, 32, 4), seed=0)  # the first steps make buffers
    for num_streams in arguments.streams:
        load = Load(num_streams, arguments.prompt_tokens, arguments.output_tokens)
        runs = {name: run(engine, load, seed=num_streams) for name, engine in engines.items()}
        baseline = runs[arguments.kernels[-1]] if len(runs) > 1 else None
        for name, measured in runs.items():
            case = f"{dtype} {name}, {num_streams} streams"
            add_rows(report, case, load, measured, baseline)
            add_roofline(report, case, machine, config, dtype, load, measured)
    for engine in engines.values():
        engine.close()


def make_engine(arguments: argparse.Namespace, dtype: str, kernels: KernelChoice) -> LLMEngine:
    config = EngineConfig(
        role="normal",
        engine_id="benchmark",
        epoch=1,
        model=arguments.model,
        dtype=dtype,
        kernels=kernels,
        num_threads=arguments.num_threads,
        max_num_seqs=max(arguments.streams),
        prefix_cache=False,
        overlap=arguments.overlap,
        command_endpoint="",
        event_endpoint="",
    )
    engine, _ = build_engine(config, lambda: None, lambda stage, share: None)
    return engine


def run(engine: LLMEngine, load: Load, seed: int) -> Run:
    chance = random.Random(seed)
    for index in range(load.num_streams):
        prompt = tuple(chance.randrange(100, 40_000) for _ in range(load.num_prompt_tokens))
        sampling = SamplingParams(max_tokens=load.num_output_tokens, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    started_s = last_s = time.perf_counter()
    first_token_s: dict[str, float] = {}
    step_s: list[float] = []
    while engine.has_work:
        outputs = [*engine.poll(), *engine.step()]
        now_s = time.perf_counter()
        if len(first_token_s) == len(outputs) == load.num_streams:
            step_s.append(now_s - last_s)
        for output in outputs:
            first_token_s.setdefault(output.request_id, now_s - started_s)
        last_s = now_s
    return Run(tuple(first_token_s.values()), tuple(step_s))


def add_rows(report: Report, case: str, load: Load, measured: Run, baseline: Run | None) -> None:
    others = {} if baseline is None or baseline is measured else dict(_figures(load, baseline))
    for (metric, unit), value in _figures(load, measured).items():
        report.add(case, metric, value, unit, others.get((metric, unit)))


def _figures(load: Load, measured: Run) -> dict[tuple[str, str], float]:
    step_s = median(measured.step_s)
    return {
        ("prefill", "tokens/s"): load.num_streams * load.num_prompt_tokens / measured.prefill_s,
        ("TTFT median", "s"): median(measured.first_token_s),
        ("decode step", "ms"): step_s * 1000,
        ("decode", "tokens/s"): load.num_streams / step_s,
    }


def add_roofline(
    report: Report, case: str, machine: Machine, config: ModelConfig, dtype: str, load: Load, measured: Run
) -> None:
    prompt, num_streams = load.num_prompt_tokens, load.num_streams
    decode_s = least_step_s(
        machine,
        config,
        dtype,
        num_rows=num_streams,
        num_logit_rows=num_streams,
        num_keys=num_streams * (prompt + load.num_output_tokens // 2),
    )
    prefill_s = least_step_s(
        machine,
        config,
        dtype,
        num_rows=num_streams * prompt,
        num_logit_rows=num_streams,
        num_keys=num_streams * prompt * (prompt + 1) // 2,
    )
    report.add(case, "roofline, prefill", prefill_s / measured.prefill_s, "")
    report.add(case, "roofline, decode", decode_s / median(measured.step_s), "")


if __name__ == "__main__":
    main()
