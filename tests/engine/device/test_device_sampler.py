"""Tokens drawn where the logits are, are those that the host would draw."""

import numpy as np
import pytest
import torch

from engine.device_sampler import DeviceSampler
from engine.errors import ModelOutputError
from engine.logit_edits import LogitEdits
from engine.sampler import NO_LOGPROBS, Sampler, SamplingRows

CPU = torch.device("cpu")
VOCAB = 300


def rows(n: int, num_logprobs: int = NO_LOGPROBS, **changes: object) -> SamplingRows:
    fields: dict[str, object] = {
        "temperature": np.tile(np.array([0.0, 0.7, 1.0, 2.0], np.float32), n)[:n],
        "top_k": np.tile(np.array([0, 5, 0, 40, 1000], np.int32), n)[:n],
        "top_p": np.tile(np.array([1.0, 1.0, 0.6], np.float32), n)[:n],
        "min_p": np.tile(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0], np.float32), n)[:n],
        "seed": np.arange(n, dtype=np.int64) * 77,
        "output_index": np.arange(n, dtype=np.int32) % 9,
        "num_logprobs": np.full(n, num_logprobs, np.int32),
    }
    return SamplingRows(**(fields | changes))  # type: ignore[arg-type]


def logits(n: int) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(1)) * 4


@pytest.mark.parametrize("filtered", [True, False])
def test_draws_are_those_of_the_host(filtered: bool) -> None:
    how = rows(200)
    if not filtered:
        how = rows(200, top_k=np.zeros(200, np.int32), top_p=np.ones(200, np.float32))
    expected = Sampler().sample(logits(200), how).token_ids
    assert np.array_equal(DeviceSampler(CPU).sample(logits(200), how).token_ids, expected)


def test_edits_and_logprobs_leave_the_device_logits_alone() -> None:
    how, edits = rows(3, num_logprobs=2), LogitEdits()
    edits.ban(1, np.arange(1, VOCAB, dtype=np.int64))
    given = logits(3)
    drawn = DeviceSampler(CPU).sample(given, how, edits)
    assert torch.equal(given, logits(3))
    assert drawn.token_ids[1] == 0
    assert drawn.logprobs is not None


def test_logits_that_are_no_numbers_are_an_error() -> None:
    broken = logits(4)
    broken[2, 7] = torch.nan
    with pytest.raises(ModelOutputError, match=r"not finite in rows \[2\]"):
        DeviceSampler(CPU).sample(broken, rows(4))
