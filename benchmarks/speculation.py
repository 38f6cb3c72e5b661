"""Prompt-lookup drafts against none: tokens per sequence and step, tokens per second, equal answers.

Two NORMAL engines over the same weights take the same greedy requests in turns. `code`: HumanEval prompts to
complete; `edit`: the same code to be written again with one change; `chat`: MT-Bench questions.
"""

import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.report import Report, argument_parser
from engine.choices import Choices
from engine.drafters import PromptLookup
from engine.handover_role import NoHandover
from engine.ipc import AddRequest, EngineStats
from engine.kv_pool import KVLayout, KVPool
from engine.llm_engine import LLMEngine
from engine.model.interface import DecoderModel
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from engine.sampler import Sampler
from model_files import ModelConfig, resolve_model
from shared_scheduler import EngineType, Scheduler, SchedulerConfig
from wire.sampling import SamplingParams

PROMPTS = Path(__file__).parent / "data" / "speculation_prompts.jsonl.gz"
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
NUM_BLOCKS = 300


@dataclass(slots=True)
class Run:
    """What one engine made of one set of prompts."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_decoded: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers.values())) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Per sequence in a decode step."""
        return 1 + self.num_accepted / max(1, self.num_decoded)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16w"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=16, help="of each set")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    files = resolve_model(arguments.model)
    tokenizer = files.tokenizer()
    model = load_model(files, arguments.dtype, max_positions=MAX_MODEL_LEN, num_threads=arguments.num_threads)
    plain, drafting = (make_engine(model, files.config(), n) for n in (0, arguments.num_draft_tokens))
    report = Report("speculation")
    for name, texts in prompt_sets(arguments.prompts).items():
        prompts = [tuple(tokenizer.encode(text).ids) for text in texts]
        for num_streams in arguments.streams:
            without = run(plain, prompts, num_streams, arguments.output_tokens)
            drafted = run(drafting, prompts, num_streams, arguments.output_tokens)
            add_rows(report, f"{name}, {num_streams} streams", drafted, without)
    report.finish(arguments.json)


def add_rows(report: Report, case: str, drafted: Run, without: Run) -> None:
    num_equal = sum(drafted.answers[i] == answer for i, answer in without.answers.items())
    report.add(case, "equal greedy answers", num_equal, "requests", len(without.answers))
    report.add(case, "tokens per sequence and step", drafted.tokens_per_step, "", 1.0)
    report.add(case, "drafts accepted", drafted.num_accepted, "tokens", drafted.num_drafted)
    report.add(case, "output tokens/s", drafted.tokens_per_s, "1/s", without.tokens_per_s)


def prompt_sets(num_prompts: int) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {"code": [], "edit": [], "chat": []}
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


def make_engine(model: DecoderModel, config: ModelConfig, num_draft_tokens: int) -> LLMEngine:
    """An engine with a pool of its own over loaded weights."""
    pool = KVPool(KVLayout.of(config, BLOCK_SIZE), NUM_BLOCKS)
    scheduler = Scheduler(
        SchedulerConfig(
            engine_type=EngineType.NORMAL,
            block_size=BLOCK_SIZE,
            num_blocks=pool.num_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=MAX_MODEL_LEN,
            prefill_attempt_interval=1,
            eos_token_ids=config.eos_token_ids,
            max_num_draft_tokens=num_draft_tokens,
        )
    )
    return LLMEngine(
        scheduler,
        ModelRunner(model, config, pool),
        Sampler(),
        NoHandover(scheduler),
        choices=Choices(scheduler),
        drafter=PromptLookup(scheduler.config.num_draft_slots) if num_draft_tokens else None,
    )


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
            result.answers.setdefault(int(output.request_id), []).extend(tokens)
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
