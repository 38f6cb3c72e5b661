"""The dataclasses survive JSON and msgpack, and refuse what is out of range by name."""

import msgspec
import pytest
from pydantic import TypeAdapter, ValidationError

from wire.json_body import to_json
from wire.sampling import SamplingParams
from wire.services import (
    CompletionEvent,
    CompletionRequest,
    OutputToken,
    PromptEngineAddress,
    ServiceError,
    TokenLogprobs,
)

REQUEST = CompletionRequest(
    request_id="r",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=3, temperature=0.5, seed=7, stop_token_ids=(9,)),
    handover_id="h",
    prompt_engine=PromptEngineAddress(engine_id="e", epoch=2**62, control_address="tcp://127.0.0.1:1"),
)
LOGPROBS = TokenLogprobs(logprob=-0.5, top_token_ids=(5,), top_logprobs=(-0.5,))
EVENT = CompletionEvent(
    tokens=(OutputToken(index=1, token_id=5, logprobs=LOGPROBS),),
    error=ServiceError(message="m", type="t"),
)


@pytest.mark.parametrize("value", [REQUEST, EVENT])
def test_json_read_by_pydantic_and_msgpack_read_by_msgspec_give_the_value_back(value: object) -> None:
    assert TypeAdapter(type(value)).validate_json(to_json(value)) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("logprobs", 21),
    ],
)
def test_sampling_out_of_range_is_refused_naming_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": 1, field: value})
    encoded = msgspec.json.encode({"max_tokens": 1, field: value})
    with pytest.raises((msgspec.ValidationError, ValidationError)):
        msgspec.json.decode(encoded, type=SamplingParams)
