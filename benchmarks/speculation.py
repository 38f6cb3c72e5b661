"""Prompt-lookup drafts against none: tokens per sequence and step, tokens per second, equal answers.

Two NORMAL engines of the same model take the same greedy requests in turns. `code`: HumanEval prompts to
complete; `edit`: the same code to be written again with one change; `chat`: MT-Bench questions.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.journal import Journal, Line, add_journal_option
from benchmarks.report import Report, argument_parser
from engine.assembly import build_engine
from engine.config import EngineConfig, SpeculativeMethod
from engine.ipc import AddRequest, EngineStats
from engine.llm_engine import LLMEngine
from model_files import resolve_model
from wire.sampling import SamplingParams

PROMPTS = Path(__file__).parent / "data" / "speculation_prompts.jsonl.gz"
SETS = ("code", "edit", "chat")
METHODS: tuple[SpeculativeMethod, ...] = ("off", "ngram")


@dataclass(slots=True)
class Run:
    """What one engine made of one set of prompts."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    """By place of the prompt in its set."""
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_decoded: int = 0


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16w"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=16, help="of each set")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "torch"))
    add_journal_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    tokenizer, journal = resolve_model(arguments.model).tokenizer(), Journal(arguments.journal)
    engines = {method: make_engine(arguments, method) for method in METHODS}
    rows = [(name, n) for n in arguments.streams for name in SETS]
    sets = prompt_sets(arguments.prompts)
    for name, num_streams in rows:
        prompts = [tuple(tokenizer.encode(text).ids) for text in sets[name]]
        for method, engine in engines.items():
            if not journal.having(set=name, streams=num_streams, drafts=method):
                result = run(engine, prompts, num_streams, arguments.output_tokens)
                journal.add(set=name, streams=num_streams, drafts=method, **asdict(result))
    report = Report("speculation")
    for name, num_streams in rows:
        lines = [journal.having(set=name, streams=num_streams, drafts=method)[-1] for method in METHODS]
        add_rows(report, f"{name}, {num_streams} streams", *lines)
    for engine in engines.values():
        engine.close()
    report.finish(arguments.json)


def add_rows(report: Report, case: str, without: Line, drafted: Line) -> None:
    num_equal = sum(drafted["answers"][i] == answer for i, answer in without["answers"].items())
    rates = [sum(map(len, line["answers"].values())) / line["seconds"] for line in (drafted, without)]
    tokens_per_step = 1 + drafted["num_accepted"] / max(1, drafted["num_decoded"])
    report.add(case, "equal greedy answers", num_equal, "requests", len(without["answers"]))
    report.add(case, "tokens per sequence and step", tokens_per_step, "", 1.0)
    report.add(case, "drafts accepted", drafted["num_accepted"], "tokens", drafted["num_drafted"])
    report.add(case, "output tokens/s", rates[0], "1/s", rates[1])


def prompt_sets(num_prompts: int) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {name: [] for name in SETS}
    for name, prompt in read_prompts():
        if name == "code":
            sets["code"].append(chat("Complete this function:\n" + prompt))
            sets["edit"].append(chat("Repeat this code, but call the function `solve`:\n" + prompt))
        else:
            sets["chat"].append(chat(prompt))
    return {name: prompts[:num_prompts] for name, prompts in sets.items()}


def read_prompts() -> Iterator[tuple[str, str]]:
    with gzip.open(PROMPTS, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["set"], row["prompt"]


def chat(text: str) -> str:
    """In the embedded model's format."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def make_engine(arguments: argparse.Namespace, method: SpeculativeMethod) -> LLMEngine:
    config = EngineConfig(
        role="normal",
        engine_id="benchmark",
        epoch=1,
        model=arguments.model,
        dtype=arguments.dtype,
        kernels=arguments.kernels,
        num_threads=arguments.num_threads,
        kv_bytes=512 << 20,
        prefix_cache=False,
        prefill_attempt_interval=1,
        speculative=method,
        num_draft_tokens=arguments.num_draft_tokens,
        command_endpoint="",
        event_endpoint="",
    )
    engine, _ = build_engine(config, lambda: None, lambda stage, share: None)
    return engine


def run(engine: LLMEngine, prompts: list[tuple[int, ...]], num_streams: int, num_output_tokens: int) -> Run:
    """Closed loop of greedy requests."""
    result, before, started_s = Run(), engine.stats(), time.perf_counter()
    waiting, num_open = list(enumerate(prompts)), 0
    while waiting or num_open:
        while waiting and num_open < num_streams:
            index, prompt = waiting.pop(0)
            sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0)
            engine.add(AddRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
            num_open += 1
        for output in [*engine.poll(), *engine.step()]:
            tokens = [token.token_id for token in output.tokens]
            result.answers.setdefault(output.request_id, []).extend(tokens)
            num_open -= output.is_last
    result.seconds = time.perf_counter() - started_s
    count(result, before, engine.stats())
    return result


def count(result: Run, before: EngineStats, after: EngineStats) -> None:
    result.num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
    result.num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    result.num_decoded = after.num_decoded_sequences - before.num_decoded_sequences


if __name__ == "__main__":
    main()
