"""The dataclasses survive JSON and msgpack, and refuse what is out of range by name."""

import msgspec
import pytest
from pydantic import TypeAdapter, ValidationError

from wire.json_body import to_json
from wire.sampling import MAX_SEED, SamplingParams, StructuredOutput, StructureKind
from wire.services import (
    CompletionEvent,
    CompletionRequest,
    OutputToken,
    PromptChoice,
    PromptEngineAddress,
    PromptRequest,
    PromptResponse,
    ServiceError,
    TokenLogprobs,
)

REQUEST = CompletionRequest(
    request_id="r",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(
        max_tokens=3,
        temperature=0.5,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.5,
        logit_bias=((5, -100.0), (6, 2.5)),
        structured=StructuredOutput(kind="choice", value='["yes", "no"]'),
        stop_token_ids=(9,),
    ),
    num_completions=3,
    handover_id="h",
    prompt_engine=PromptEngineAddress(engine_id="e", epoch=2**62, control_address="tcp://127.0.0.1:1"),
)
LOGPROBS = TokenLogprobs(logprob=-0.5, top_token_ids=(5,), top_logprobs=(-0.5,))
EVENT = CompletionEvent(
    choice=2,
    tokens=(OutputToken(index=1, token_id=5, logprobs=LOGPROBS),),
    error=ServiceError(message="m", type="t"),
)

FIRST_TOKENS = PromptResponse(
    request_id="r",
    choices=(
        PromptChoice(token=OutputToken(index=0, token_id=5, logprobs=LOGPROBS)),
        PromptChoice(token=OutputToken(index=0, token_id=2), finish_reason="stop"),
    ),
    num_prompt_tokens=2,
    num_cached_tokens=0,
)


@pytest.mark.parametrize("value", [REQUEST, EVENT, FIRST_TOKENS])
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
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("min_tokens", 2),
        ("logit_bias", ((5, 100.5),)),
        ("logit_bias", ((5, 1.0), (5, 2.0))),
    ],
)
def test_sampling_out_of_range_is_refused_naming_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": 1, field: value})
    encoded = msgspec.json.encode({"max_tokens": 1, field: value})
    with pytest.raises((msgspec.ValidationError, ValidationError)):
        msgspec.json.decode(encoded, type=SamplingParams)


@pytest.mark.parametrize(("kind", "value"), [("json_schema", ""), ("json_object", "{}")])
def test_a_structure_has_the_value_its_kind_needs(kind: StructureKind, value: str) -> None:
    with pytest.raises(ValueError, match=kind):
        StructuredOutput(kind=kind, value=value)


@pytest.mark.parametrize("wish", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_structure_alone_says_where_the_answer_ends(wish: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wish))} and structured exclude each other"):
        SamplingParams(max_tokens=3, structured=StructuredOutput(kind="json_object"), **wish)


@pytest.mark.parametrize("num_completions", [0, 9, -1])
def test_another_number_of_choices_is_refused_naming_the_limit(num_completions: int) -> None:
    sampling = SamplingParams(max_tokens=1)
    for body in (PromptRequest, CompletionRequest):
        with pytest.raises(ValueError, match="num_completions must be between 1 and 8"):
            body(
                request_id="r",
                handover_id="h",
                prompt_token_ids=(1,),
                sampling=sampling,
                num_completions=num_completions,
            )


def test_the_first_choice_keeps_the_seed_and_the_others_get_their_own() -> None:
    """The numbers are a part of the protocol: both engines of a pair, of any version, must find the same."""
    sampling = SamplingParams(max_tokens=1, seed=7)
    assert sampling.of_choice(0) is sampling
    assert [sampling.of_choice(choice).seed for choice in (1, 2)] == [
        2174948161648732372,
        2888775511750995287,
    ]


def test_no_two_choices_of_neighbouring_seeds_share_theirs() -> None:
    seeds = [
        SamplingParams(max_tokens=1, seed=seed).of_choice(choice).seed
        for seed in (*range(200), MAX_SEED)
        for choice in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize(("num_replayed_tokens", "num_completions"), [(-1, 1), (3, 1), (5, 1), (2, 2)])
def test_a_replay_that_leaves_nothing_to_do_or_is_of_several_choices_is_refused(
    num_replayed_tokens: int, num_completions: int
) -> None:
    for body in (PromptRequest, CompletionRequest):
        with pytest.raises(ValueError, match="num_replayed_tokens"):
            body(
                request_id="r",
                handover_id="h",
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(max_tokens=9),
                num_completions=num_completions,
                num_replayed_tokens=num_replayed_tokens,
            )
