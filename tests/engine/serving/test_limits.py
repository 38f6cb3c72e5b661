"""What an engine could never serve is refused before it reaches the engine."""

import pytest

from engine.serving.errors import InvalidRequest
from engine.serving.limits import check_limits
from tests.engine.serving.builders import ready
from wire.sampling import SamplingParams


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"),
    [(0, 1, "prompt_token_ids"), (16, 1, "prompt_token_ids"), (10, 7, "max_tokens")],
)
def test_refused_naming_the_field(num_prompt_tokens: int, max_tokens: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_limits(ready(max_model_len=16), (1,) * num_prompt_tokens, SamplingParams(max_tokens=max_tokens))
    assert refused.value.error.param == param


@pytest.mark.parametrize("token_id", [-1, 100])
def test_token_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=r"\[0, 100\)"):
        check_limits(ready(vocab_size=100), (1, token_id), SamplingParams(max_tokens=1))


def test_a_request_that_just_fits_is_taken() -> None:
    check_limits(ready(max_model_len=16), (1,) * 15, SamplingParams(max_tokens=1))


def test_a_bias_on_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\[0, 100\)"):
        check_limits(ready(vocab_size=100), (1,), SamplingParams(max_tokens=1, logit_bias=((100, 1.0),)))


def test_replayed_tokens_count_against_max_tokens_once() -> None:
    sampling = SamplingParams(max_tokens=6)
    check_limits(ready(max_model_len=16), (1,) * 15, sampling, num_replayed_tokens=5)
    with pytest.raises(InvalidRequest, match="exceed"):
        check_limits(ready(max_model_len=16), (1,) * 15, sampling, num_replayed_tokens=4)
