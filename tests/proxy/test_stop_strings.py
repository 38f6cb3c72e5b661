from hypothesis import given
from hypothesis import strategies as st

from proxy.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What a client sees of the pieces, and the stop string that ended it."""
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.found is not None:
            return text, matcher.found
    return text + matcher.flush(), None


def earliest_end(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, spelled out: the first prefix of `text` that ends with a stop string; the longest one."""
    for length in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:length].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: length - len(longest)], longest
    return text, None


small_texts = st.text(alphabet="abé🙂", max_size=12)


@given(
    stops=st.lists(small_texts.filter(bool), max_size=4),
    pieces=st.lists(small_texts, max_size=8),
)
def test_any_cut_of_the_text_gives_the_earliest_match(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == earliest_end(stops, "".join(pieces))


@given(stops=st.lists(small_texts.filter(bool), min_size=1, max_size=4), text=small_texts)
def test_text_is_held_back_only_as_far_as_a_stop_string_could_still_match(
    stops: list[str], text: str
) -> None:
    matcher = StopStrings(stops)
    out = matcher.push(text)
    if matcher.found is None:
        held = text[len(out) :]
        assert out + held == text
        longest = max(k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]))
        assert len(held) == longest


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["ab", "", "c"]) == ("abc", None)


def test_two_that_end_together_are_cut_at_the_longer() -> None:
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_a_false_start_is_released() -> None:
    matcher = StopStrings(["aab"])
    assert [matcher.push(char) for char in "aaaab"] == ["", "", "a", "a", ""]
    assert matcher.found == "aab"
