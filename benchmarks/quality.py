"""Every weight format against fp32 on the same texts: perplexity, divergence, agreement of the likeliest.

For each format and set of texts: perplexity (baseline: that of fp32), the mean Kullback-Leibler divergence of
its next-token distributions from those of fp32, and at how many places both find the same token likeliest.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from benchmarks.report import Report, argument_parser
from engine.kv_pool import KVLayout, KVPool
from engine.model.linear import WeightFormat
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from model_files import ModelFiles, resolve_model
from shared_scheduler import Batch

TEXTS = Path(__file__).parent / "data" / "quality_texts.jsonl.gz"
BLOCK_SIZE = 32
MAX_TOKENS = 512
"""Of one text; the rest is cut off."""
BASELINE: WeightFormat = "fp32"


@dataclass(slots=True)
class Score:
    """Sums over the places of a set's texts."""

    num_tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    num_agreeing: int = 0

    def add(self, logprobs: torch.Tensor, baseline: torch.Tensor, targets: torch.Tensor) -> None:
        """Natural-log probabilities float32 [places, vocab], and the tokens that come next."""
        self.num_tokens += len(targets)
        self.nats -= float(logprobs.gather(1, targets[:, None]).sum(dtype=torch.float64))
        difference = baseline.exp() * (baseline - logprobs)
        self.divergence += float(difference.sum(dtype=torch.float64))
        self.num_agreeing += int((logprobs.argmax(-1) == baseline.argmax(-1)).sum())

    def joined(self, other: "Score") -> "Score":
        return Score(
            self.num_tokens + other.num_tokens,
            self.nats + other.nats,
            self.divergence + other.divergence,
            self.num_agreeing + other.num_agreeing,
        )

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nats / self.num_tokens))


def main() -> None:
    formats = get_args(WeightFormat)
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--formats", nargs="+", default=formats, choices=formats)
    parser.add_argument("--texts", type=int, default=None, help="only the first so many of each set")
    arguments = parser.parse_args()
    files = resolve_model(arguments.model)
    texts = read_texts(arguments.texts)
    report = Report("quality")
    scores = {
        name: score_format(files, name, texts) for name in {BASELINE: 0, **dict.fromkeys(arguments.formats)}
    }
    for name, by_set in scores.items():
        add_rows(report, name, by_set, scores[BASELINE])
    report.finish(arguments.json)


def add_rows(report: Report, name: str, scores: dict[str, Score], baseline: dict[str, Score]) -> None:
    for case, score in scores.items():
        report.add(f"{name}, {case}", "perplexity", score.perplexity, "", baseline[case].perplexity)
        report.add(f"{name}, {case}", "KL from fp32", score.divergence / score.num_tokens, "nats/token")
        report.add(f"{name}, {case}", "same likeliest token", score.num_agreeing, "places", score.num_tokens)


def read_texts(limit: int | None) -> dict[str, list[str]]:
    sets: dict[str, list[str]] = {}
    with gzip.open(TEXTS, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            sets.setdefault(row["set"], []).append(row["text"])
    return {name: texts[:limit] for name, texts in sets.items()}


def score_format(files: ModelFiles, name: WeightFormat, texts: dict[str, list[str]]) -> dict[str, Score]:
    """By set, and of all together."""
    runner, baseline = make_runner(files, name), make_runner(files, BASELINE)
    tokenizer = files.tokenizer()
    scores = {case: Score() for case in texts}
    for case, some in texts.items():
        for text in some:
            ids = np.array(tokenizer.encode(text).ids[:MAX_TOKENS], np.int32)
            own, expected = (logprobs_behind(side, ids) for side in (runner, baseline))
            scores[case].add(own, expected, torch.from_numpy(ids[1:].astype(np.int64)))
    whole = Score()
    for score in scores.values():
        whole = whole.joined(score)
    return {**scores, "all": whole}


def make_runner(files: ModelFiles, name: WeightFormat) -> ModelRunner:
    config = files.config()
    pool = KVPool(KVLayout.of(config, BLOCK_SIZE), 1 + MAX_TOKENS // BLOCK_SIZE)
    return ModelRunner(load_model(files, name, max_positions=MAX_TOKENS), config, pool)


def logprobs_behind(runner: ModelRunner, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> torch.Tensor:
    """Of the whole vocabulary behind every token but the last, in one prefill."""
    size = len(ids)
    blocks = np.arange(1, 2 + (size - 1) // BLOCK_SIZE, dtype=np.int32)
    one, length = np.ones(1, np.int32), np.array([size], np.int32)
    batch = Batch(
        is_prompt=True,
        block_size=BLOCK_SIZE,
        token_ids=ids,
        positions=np.arange(size, dtype=np.int32),
        slot_mapping=np.arange(size, dtype=np.int32) + BLOCK_SIZE,
        seqlens_q=length,
        seqlens_k=length,
        block_tables=blocks[None],
        state_slots=0 * one,
        output_indices=0 * one,
        input_from_previous=-one,
    )
    return runner.forward(batch, np.arange(size - 1)).log_softmax(dim=-1)


if __name__ == "__main__":
    main()
