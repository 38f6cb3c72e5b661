"""Chunks that are encoded but for their text equal those that are encoded whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.message_delta import MessageDelta
from proxy.openai_responses import TEXT_MARK, Kind, ResponseBuilder

TEXTS = st.one_of(st.text(min_size=1), st.sampled_from(("👩‍👩‍👧", "שלום", '"\\\n\0', "\u2028", TEXT_MARK)))


@pytest.mark.parametrize("kind", ["chat", "text"])
@given(text=TEXTS, model=st.sampled_from(("m", TEXT_MARK, '{"text":""}')), index=st.integers(0, 7))
def test_a_chunk_of_text_alone_is_the_same_either_way(kind: Kind, text: str, model: str, index: int) -> None:
    builder = ResponseBuilder(kind, "id", model, 1)
    whole = builder.delta_chunk(index, MessageDelta(content=text), is_first=False, with_logprobs=False)
    assert builder.content_chunks(index).chunk(text) == whole
