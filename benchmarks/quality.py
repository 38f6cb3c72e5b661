"""Every weight format against fp32 on the same texts: perplexity, divergence, agreement of the likeliest.

For each format and set of texts: perplexity (baseline: that of fp32), the mean Kullback-Leibler divergence of
its next-token distributions from those of fp32, and at how many places both find the same token likeliest.
`--journal FILE` makes it resumable, text by text.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from benchmarks.journal import Journal, Line, add_journal_option
from benchmarks.report import Report, argument_parser
from engine.errors import WeightFormatError
from engine.model.linear import WeightFormat
from engine.model_runner import Int32Array, Runner, load_model_runner
from model_files import ModelFiles, resolve_model
from shared_scheduler import Batch

TEXTS = Path(__file__).parent / "data" / "quality_texts.jsonl.gz"
BLOCK_SIZE = 32
MAX_TOKENS = 512
"""Of one text; the rest is cut off."""
KV_BYTES = 64 << 20
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

    @classmethod
    def of_lines(cls, lines: Iterable[Line]) -> "Score":
        """Of all texts of these lines together."""
        whole = cls()
        for line in lines:
            for name, value in line["score"].items():
                setattr(whole, name, getattr(whole, name) + value)
        return whole

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nats / self.num_tokens))


def main() -> None:
    formats = get_args(WeightFormat)
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--formats", nargs="+", default=formats, choices=formats)
    parser.add_argument("--texts", type=int, default=None, help="only the first so many of each set")
    parser.add_argument("--chunk", type=int, default=MAX_TOKENS, help="tokens in a pass; 1: as in decode")
    add_journal_option(parser)
    arguments = parser.parse_args()
    files, journal = resolve_model(arguments.model), Journal(arguments.journal)
    names = list(dict.fromkeys((BASELINE, *arguments.formats)))
    texts = read_texts(arguments.texts)
    score_formats(files, names, texts, arguments.chunk, journal)
    report = Report("quality")
    scores = {name: by_set(journal, name, [*texts]) for name in names}
    for name in names:
        add_rows(report, name, scores[name], scores[BASELINE])
    report.finish(arguments.json)


def by_set(journal: Journal, name: WeightFormat, sets: list[str]) -> dict[str, Score]:
    """Of the sets, and of all together; empty for a format that cannot be had."""
    lines = journal.having(format=name)
    scores = {case: Score.of_lines(line for line in lines if line["set"] == case) for case in sets}
    return {**scores, "all": Score.of_lines(lines)} if lines else {}


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


def score_formats(
    files: ModelFiles, names: list[WeightFormat], texts: dict[str, list[str]], chunk: int, journal: Journal
) -> None:
    """A line for each text and format."""
    runners = make_runners(files, names)
    tokenizer = files.tokenizer()
    for case, some in texts.items():
        for index, text in enumerate(some):
            missing = [name for name in runners if not journal.having(set=case, text=index, format=name)]
            if not missing:
                continue
            ids = np.array(tokenizer.encode(text).ids[:MAX_TOKENS], np.int32)
            targets = torch.from_numpy(ids[1:].astype(np.int64))
            baseline = logprobs_behind(runners[BASELINE], ids, chunk)
            for name in missing:
                own = baseline if name == BASELINE else logprobs_behind(runners[name], ids, chunk)
                score = Score()
                score.add(own, baseline, targets)
                journal.add(set=case, text=index, format=name, score=asdict(score))


def make_runners(files: ModelFiles, names: list[WeightFormat]) -> dict[WeightFormat, Runner]:
    """Those that this machine and these files can have; of the others it is said why not."""
    runners: dict[WeightFormat, Runner] = {}
    for name in names:
        try:
            runners[name] = load_model_runner(
                files,
                weight_format=name,
                block_size=BLOCK_SIZE,
                kv_bytes=KV_BYTES,
                max_model_len=MAX_TOKENS,
            )
        except WeightFormatError as error:
            print(f"{name}: {error}")
    return runners


def logprobs_behind(runner: Runner, ids: Int32Array, chunk: int) -> torch.Tensor:
    """Of the whole vocabulary behind every token but the last, computed so many tokens at a time."""
    parts = [
        runner.forward(chunk_batch(ids, start, min(start + chunk, len(ids))), np.arange(rows))
        for start in range(0, len(ids) - 1, chunk)
        if (rows := min(chunk, len(ids) - 1 - start))
    ]
    return torch.cat(parts).log_softmax(dim=-1)


def chunk_batch(ids: Int32Array, start: int, end: int) -> Batch:
    blocks = np.arange(1, 2 + (end - 1) // BLOCK_SIZE, dtype=np.int32)
    none = np.zeros(1, np.int32)
    positions = np.arange(start, end, dtype=np.int32)
    return Batch(
        is_prompt=True,
        block_size=BLOCK_SIZE,
        token_ids=ids[start:end],
        positions=positions,
        slot_mapping=positions + BLOCK_SIZE,
        seqlens_q=none + (end - start),
        seqlens_k=none + end,
        block_tables=blocks[None],
        state_slots=none,
        output_indices=none,
        input_from_previous=none - 1,
    )


if __name__ == "__main__":
    main()
