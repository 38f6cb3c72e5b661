from hypothesis import given
from hypothesis import strategies as st

from proxy.detokenizer import Vocabulary
from proxy.text_stream import TextDelta, TextStream
from proxy.token_text import TokenText
from tests.proxy.builders import END_ID, TOKENIZER, ids
from wire.services import OutputToken, TokenLogprobs

VOCABULARY = Vocabulary(TOKENIZER)


def stream(stops: tuple[str, ...] = (), with_logprobs: bool = False) -> TextStream:
    return TextStream(VOCABULARY, stops=stops, end_token_ids={END_ID}, with_logprobs=with_logprobs)


def outputs(text: str, *more: int, first_index: int = 0) -> list[OutputToken]:
    """One token a byte, with its own index as a logprob."""
    return [
        OutputToken(index=index, token_id=token_id, logprobs=TokenLogprobs(logprob=-float(index)))
        for index, token_id in enumerate([*ids(text), *more], start=first_index)
    ]


def test_the_end_token_counts_but_has_no_text_and_no_logprob() -> None:
    text = stream(with_logprobs=True)
    delta = text.push(outputs("ab", END_ID), "stop")
    assert delta == TextDelta("ab", (TokenText(b"a", 0, 0.0), TokenText(b"b", 1, -1.0)), "stop")
    assert text.num_tokens == 3


def test_an_end_token_in_the_middle_does_not_end_the_text() -> None:
    text = stream()
    assert text.push([*outputs("a", END_ID), *outputs("b", first_index=2)], "length").text == "ab"


def test_a_stop_string_across_two_tokens_ends_the_answer_at_its_start() -> None:
    text = stream(stops=("lo w",))
    assert [text.push([token], None).text for token in outputs("hel")] == ["h", "e", ""]
    assert text.push(outputs("lo ", first_index=3), None).text == "l"
    assert text.push(outputs("world", first_index=6), None) == TextDelta("", (), "stop")
    assert text.num_tokens == len("hello w")


def test_held_text_comes_out_at_the_end() -> None:
    text = stream(stops=("abc",))
    assert text.push(outputs("xab"), None).text == "x"
    assert text.push([], "length") == TextDelta("ab", (), "length")


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    text = stream()
    assert text.push(outputs("a🙂")[:3], "length").text == "a\ufffd"


def test_logprobs_wait_for_their_text_and_vanish_with_it() -> None:
    text = stream(stops=("cd",), with_logprobs=True)
    assert [entry.data for entry in text.push(outputs("abc"), None).logprobs] == [b"a", b"b"]
    assert text.push(outputs("d", first_index=3), None) == TextDelta("", (), "stop")


def test_the_bytes_of_one_character_share_its_offset() -> None:
    delta = stream(with_logprobs=True).push(outputs("é!"), "length")
    assert [(entry.data, entry.text_offset) for entry in delta.logprobs] == [
        (b"\xc3", 0),
        (b"\xa9", 0),
        (b"!", 1),
    ]


@given(
    text=st.text(alphabet="ab🙂", max_size=12),
    stops=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_any_batching_gives_the_same_text_logprobs_and_count(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    tokens = outputs(text)
    whole = stream(tuple(stops), with_logprobs=True)
    expected = whole.push(tokens, "length")
    pieces = stream(tuple(stops), with_logprobs=True)
    deltas: list[TextDelta] = []
    bounds = sorted(min(cut, len(tokens)) for cut in cuts)
    for start, end in zip([0, *bounds], [*bounds, len(tokens)], strict=True):
        deltas.append(pieces.push(tokens[start:end], "length" if end == len(tokens) else None))
        if deltas[-1].finish_reason is not None:
            break
    assert "".join(delta.text for delta in deltas) == expected.text
    assert tuple(entry for delta in deltas for entry in delta.logprobs) == expected.logprobs
    assert deltas[-1].finish_reason == expected.finish_reason
    assert pieces.num_tokens == whole.num_tokens
