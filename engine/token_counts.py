"""How often a sequence has each token, kept as it grows: what penalties are computed from."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of one sequence, in order of appearance, and how often its output has each."""

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        """Tokens of the prompt count as seen, but not as output."""
        ids = list(dict.fromkeys(prompt_token_ids))
        self._places = {token_id: place for place, token_id in enumerate(ids)}
        self._token_ids = np.array(ids, np.int64)
        self._counts = np.zeros(len(ids), np.float32)

    @property
    def token_ids(self) -> Int64Array:
        """[K]"""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> Float32Array:
        """[K]: how often each is in the output."""
        return self._counts[: len(self._places)]

    def add(self, token_ids: Iterable[int]) -> None:
        """More output."""
        for token_id in token_ids:
            place = self._place(token_id)
            self._counts[place] += 1

    def with_more(self, token_ids: Iterable[int]) -> "TokenCounts":
        """What `add` would make of it; this one stays as it is."""
        other = TokenCounts()
        other._places = dict(self._places)
        other._token_ids, other._counts = self._token_ids.copy(), self._counts.copy()
        other.add(token_ids)
        return other

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._token_ids.size:
            room = max(16, place)
            self._token_ids = np.concatenate((self._token_ids, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._token_ids[place] = token_id
        return place
