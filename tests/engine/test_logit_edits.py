"""Biases, penalties and bans, against their definitions written out plainly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.logit_edits import LogitEdits
from engine.token_counts import TokenCounts
from wire.sampling import SamplingParams

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(TOKENS, st.lists(TOKENS, max_size=4))
def test_counts_grow_and_can_look_ahead(prompt: list[int], outputs: list[list[int]]) -> None:
    counts, output = TokenCounts(prompt), list[int]()
    for more in outputs:
        ahead = counts.with_more(more)
        assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == {
            token: output.count(token) for token in {*prompt, *output}
        }
        counts.add(more)
        output += more
        assert ahead.token_ids.tolist() == counts.token_ids.tolist()
        assert ahead.counts.tolist() == counts.counts.tolist()


def plain(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> list[float]:
    """The published formulas, token by token."""
    edited = []
    for token, logit in enumerate(logits):
        value = logit + dict(p.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output.count(token)
        value -= p.presence_penalty * (token in output)
        edited.append(value)
    return edited


@given(
    TOKENS,
    TOKENS,
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.5, 2),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
)
def test_biases_and_penalties_equal_their_definitions(
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    sampling = SamplingParams(
        max_tokens=1,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    logits = torch.linspace(-3, 3, VOCAB).repeat(3, 1)
    counts, edits = TokenCounts(prompt), LogitEdits()
    counts.add(output)
    edits.penalise(1, counts.token_ids, counts.counts, sampling)
    edits.bias(1, np.array([*bias], np.int64), np.array([*bias.values()], np.float32))
    expected = plain(logits[1].tolist(), prompt, output, sampling)
    edits.apply_(logits)
    assert logits[1].tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[0], torch.linspace(-3, 3, VOCAB))


def test_what_is_banned_cannot_be_biased_back() -> None:
    edits, logits = LogitEdits(), torch.zeros(2, 4)
    edits.ban(0, np.array([1, 3]))
    edits.bias(0, np.array([1]), np.array([100.0], np.float32))
    edits.apply_(logits)
    assert logits.tolist() == [[0.0, -np.inf, 0.0, -np.inf], [0.0] * 4]
