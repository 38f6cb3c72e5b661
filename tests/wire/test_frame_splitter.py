"""Frames come out whole, however the bytes arrive."""

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wire.token_link import FrameSplitter


def framed(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.integers(0, 200), max_size=12))
def test_frames_are_the_same_wherever_the_bytes_are_cut(contents: list[bytes], cuts: list[int]) -> None:
    data, splitter = b"".join(map(framed, contents)), FrameSplitter()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    got = [found for start, end in pairwise(places) for found in splitter.push(data[start:end])]
    assert got == contents


def test_a_long_frame_is_put_together_once() -> None:
    copied = 0

    class Counted(bytes):
        def __add__(self, other: Any) -> "Counted":
            nonlocal copied
            copied += len(self) + len(other)
            return Counted(super().__add__(other))

        def __getitem__(self, place: Any) -> Any:
            nonlocal copied
            part = Counted(super().__getitem__(place))
            copied += len(part)
            return part

    def pieces(data: bytes, size: int) -> Iterator[Counted]:
        return (Counted(data[at : at + size]) for at in range(0, len(data), size))

    content, splitter = bytes(100_000), FrameSplitter()
    got = [frame for piece in pieces(framed(content), 1000) for frame in splitter.push(piece)]
    assert got == [content]
    assert copied <= 2 * len(content)
