"""Statistical tests use fixed seeds, so they cannot fail by chance."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draw_rows import sampling_rows
from engine.errors import ModelOutputError
from engine.logit_edits import LogitEdits
from engine.noise import philox, uniform_noise
from engine.sampler import NO_LOGPROBS, SampledTokens, Sampler, SamplingRows
from wire.sampling import SamplingParams

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -0.5]])
VOCAB = LOGITS.shape[1]


def rows_of(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | npt.NDArray[np.int64] = 0,
    output_index: int | npt.NDArray[np.int32] = 0,
    num_logprobs: int = NO_LOGPROBS,
) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.full(count, min_p, np.float32),
        seed=np.broadcast_to(np.asarray(seed, np.int64), count).copy(),
        output_index=np.broadcast_to(np.asarray(output_index, np.int32), count).copy(),
        num_logprobs=np.full(count, num_logprobs, np.int32),
    )


def pick(rows: SamplingRows, index: npt.NDArray[np.intp]) -> SamplingRows:
    return SamplingRows(*(getattr(rows, name)[index] for name in SamplingRows.__slots__))


def sample(logits: torch.Tensor, rows: SamplingRows) -> SampledTokens:
    return Sampler().sample(logits.expand(len(rows), -1).clone(), rows)


def distribution(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> npt.NDArray[np.float64]:
    """What the sampler should draw from, written out plainly for logits without ties."""
    probs = (logits[0].double() / temperature).softmax(-1).numpy()
    order = np.argsort(-probs)
    keep = order[: top_k or len(order)]
    share = np.cumsum(probs[keep]) / probs[keep].sum()
    keep = keep[: int(np.searchsorted(share, top_p)) + 1]
    filtered = np.zeros_like(probs)
    filtered[keep] = probs[keep]
    return filtered / filtered.sum()


def chi_square(token_ids: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    """Normalised to mean 0, deviation 1; tokens of probability 0 must not occur."""
    counts = np.bincount(token_ids, minlength=len(expected))
    possible = expected > 0
    assert not counts[~possible].any()
    means = expected[possible] * len(token_ids)
    degrees = possible.sum() - 1
    return float((((counts[possible] - means) ** 2 / means).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Known answers of philox4x32 with 10 rounds from the Random123 distribution (kat_vectors)."""

    def arrays(words: tuple[int, ...]) -> tuple[npt.NDArray[np.uint64], ...]:
        return tuple(np.array([word], np.uint64) for word in words)

    assert tuple(int(word[0]) for word in philox(arrays(counter), arrays(key))) == expected


@pytest.mark.parametrize("varied", ["seed", "output_index"])
def test_neighbouring_noise_is_uniform_and_independent(varied: str) -> None:
    counts = np.arange(200_000)
    zeros = np.zeros_like(counts)
    seed, index = (counts, zeros) if varied == "seed" else (zeros, counts)
    noise = uniform_noise(seed, index.astype(np.int32))
    assert ((noise > 0) & (noise < 1)).all()
    assert chi_square((noise * 64).astype(np.int64), np.full(64, 1 / 64)) < 3
    pairs = (noise[:-1] * 16).astype(np.int64) * 16 + (noise[1:] * 16).astype(np.int64)
    assert chi_square(pairs, np.full(256, 1 / 256)) < 3
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(noise[:-lag], noise[lag:])[0, 1]) < 4 / np.sqrt(len(noise))


def test_noise_uses_all_bits_of_the_seed() -> None:
    seeds = np.array([0, 1, 2**32, 2**62, 2**63 - 1], np.int64)
    assert len(set(uniform_noise(seeds, np.zeros(5, np.int32)).tolist())) == 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": VOCAB + 5},
        {"top_p": 0.8},
        {"top_p": 0.999},
        {"top_p": 0.01},
        {"top_k": 5, "top_p": 0.7},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("varied", ["seed", "output_index"])
def test_draws_follow_the_distribution(options: dict[str, float], varied: str) -> None:
    count = 40_000
    rows = rows_of(count, **options, **{varied: np.arange(count)})
    expected = distribution(LOGITS, **options)
    token_ids = sample(LOGITS, rows).token_ids
    if (expected > 0).sum() == 1:
        assert set(token_ids.tolist()) == {int(expected.argmax())}
    else:
        assert chi_square(token_ids, expected) < 3


def test_a_nucleus_larger_than_the_quick_path_is_exact() -> None:
    """20,000 nearly equal tokens: top_p = 0.5 keeps the upper half."""
    logits = torch.linspace(0, 0.001, 20_000)[None]
    token_ids = sample(logits, rows_of(400, top_p=0.5, seed=np.arange(400))).token_ids
    kept = np.flatnonzero(distribution(logits, top_p=0.5))
    assert token_ids.min() >= kept.min() - 1
    assert len(set(token_ids.tolist())) > 380


def test_greedy_takes_the_first_of_equal_maxima_whatever_the_filters_say() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, rows_of(2, temperature=0.0, top_k=2, top_p=0.5)).token_ids.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45])
def test_temperature_near_zero_is_greedy(temperature: float) -> None:
    rows = rows_of(200, temperature=temperature, seed=np.arange(200))
    assert set(sample(LOGITS * 40, rows).token_ids.tolist()) == {0}


def test_tokens_that_tie_at_the_limit_are_all_candidates() -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, -1.0]])
    rows = rows_of(500, top_k=2, seed=np.arange(500))
    assert set(sample(logits, rows).token_ids.tolist()) == {0, 2, 3}


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    rows = rows_of(2000, seed=np.arange(2000))
    assert set(sample(logits, rows).token_ids.tolist()) == {1, 3}


@settings(max_examples=50)
@given(st.data())
def test_a_row_draws_the_same_token_in_any_batch(data: st.DataObject) -> None:
    count, vocab = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([3, 50, 3000]))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = torch.from_numpy(generator.normal(0, 2, (count, vocab)).astype(np.float32))
    rows = SamplingRows(
        temperature=generator.choice([0.0, 0.3, 1.0, 5.0], count).astype(np.float32),
        top_k=generator.choice([0, 1, 7, 600], count).astype(np.int32),
        top_p=generator.choice([0.1, 0.9, 1.0], count).astype(np.float32),
        min_p=generator.choice([0.0, 0.05, 1.0], count).astype(np.float32),
        seed=generator.integers(0, 2**63 - 1, count),
        output_index=generator.integers(0, 10_000, count).astype(np.int32),
        num_logprobs=generator.choice([NO_LOGPROBS, 0, 3], count).astype(np.int32),
    )
    together = Sampler().sample(logits.clone(), rows)
    order = generator.permutation(count)
    shuffled = Sampler().sample(logits[torch.from_numpy(order)], pick(rows, order))
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    for index in range(count):
        alone = Sampler().sample(logits[index : index + 1].clone(), pick(rows, np.array([index])))
        assert alone.token_ids.tolist() == [together.token_ids[index]]
        if rows.num_logprobs[index] != NO_LOGPROBS:
            assert alone.logprobs is not None
            assert together.logprobs is not None
            assert alone.logprobs.row(0) == together.logprobs.row(index)


@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.1), (2.0, 0.3), (0.5, 0.01)])
def test_min_p_leaves_tokens_of_at_least_that_share_of_the_likeliest(
    temperature: float, min_p: float
) -> None:
    rows = rows_of(4000, temperature=temperature, min_p=min_p, output_index=np.arange(4000, dtype=np.int32))
    probs = distribution(LOGITS, temperature)
    expected = np.where(probs >= min_p * probs.max(), probs, 0.0)
    assert chi_square(sample(LOGITS, rows).token_ids, expected / expected.sum()) < 4


def test_the_logits_given_are_left_as_they_were() -> None:
    logits = LOGITS.repeat(3, 1)
    Sampler().sample(logits, rows_of(3, temperature=0.7, top_k=2, top_p=0.5, num_logprobs=2))
    assert torch.equal(logits, LOGITS.repeat(3, 1))


def test_logprobs_are_of_the_distribution_before_temperature_and_filters() -> None:
    rows = rows_of(1, temperature=0.01, top_k=1, num_logprobs=3)
    sampled = sample(LOGITS, rows)
    assert sampled.logprobs is not None
    found = sampled.logprobs.row(0)
    assert found is not None
    expected = LOGITS[0].double().log_softmax(-1)
    assert sampled.token_ids.tolist() == [0]
    assert found.logprob == pytest.approx(float(expected[0]), abs=1e-6)
    assert found.top_token_ids == (0, 6, 1)
    assert found.top_logprobs == pytest.approx([float(expected[i]) for i in (0, 6, 1)], abs=1e-6)


def test_each_row_reports_as_many_alternatives_as_it_asked_for() -> None:
    rows = rows_of(4, temperature=0.0)
    rows.num_logprobs[:] = [NO_LOGPROBS, 0, 2, 8]
    sampled = sample(LOGITS, rows)
    assert sampled.logprobs is not None
    reported = [sampled.logprobs.row(i) for i in range(4)]
    assert reported[0] is None
    assert [len(row.top_token_ids) for row in reported if row] == [0, 2, 8]


def test_nothing_is_reported_when_nobody_asks() -> None:
    assert sample(LOGITS, rows_of(2)).logprobs is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_are_refused_by_row(bad: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    with pytest.raises(ModelOutputError, match=r"rows \[1\]"):
        Sampler().sample(logits, rows_of(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_is_named_and_takes_the_models_first_choice(temperature: float) -> None:
    """The other rows draw what they draw without it."""
    edits, rows = LogitEdits(), rows_of(3, temperature=temperature, seed=np.arange(3), num_logprobs=2)
    edits.ban(1, np.arange(VOCAB))
    edited = Sampler().sample(LOGITS.expand(3, -1).clone(), rows, edits)
    plain = sample(LOGITS, rows)
    assert edited.dead_ends == (1,)
    assert edited.token_ids[1] == LOGITS.argmax()
    assert edited.token_ids[[0, 2]].tolist() == plain.token_ids[[0, 2]].tolist()
    assert plain.dead_ends == ()


@pytest.mark.parametrize("vocab_size", [128, 1000, 49152])
def test_a_row_is_drawn_alone_as_among_many(vocab_size: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(64, vocab_size) * 3
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 40, "top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 0.0},
    )
    params = [SamplingParams(max_tokens=9, seed=i, **ways[i % 4]) for i in range(64)]
    index = np.arange(64, dtype=np.int32)
    together = Sampler().sample(logits.clone(), sampling_rows(params, index)).token_ids
    for i in (0, 1, 2, 3, 17, 63):
        alone = Sampler().sample(
            logits[i : i + 1].clone(), sampling_rows(params[i : i + 1], index[i : i + 1])
        )
        assert alone.token_ids[0] == together[i]


def test_draws_across_blocks_follow_the_weights() -> None:
    """A thousand seeds; zeros between and behind the weights are never drawn."""
    weights = torch.zeros(300)
    weights[[5, 127, 128, 260]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    params = [SamplingParams(max_tokens=1, seed=seed) for seed in range(1000)]
    rows = sampling_rows(params, np.zeros(1000, np.int32))
    drawn = Sampler().sample(weights.log().expand(1000, -1).clone(), rows).token_ids
    counts = np.bincount(drawn, minlength=300)
    assert counts.sum() == counts[[5, 127, 128, 260]].sum()
    assert counts[[5, 127, 128, 260]] / 1000 == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.05)
