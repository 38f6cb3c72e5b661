"""The order that libstdc++'s `std::sort` gives equal keys.

`std::sort` leaves the order of equals open; the recorded decisions carry the order that the compiler's
library happened to produce: insertion sort up to 16 elements (stable), introsort above (not stable).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

THRESHOLD = 16


def std_sort_descending(keys: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    """Indices that sort `keys` descending, equals as libstdc++ leaves them."""
    items = list(enumerate(keys.tolist()))
    _Introsort(items, lambda a, b: a[1] > b[1]).run()
    return np.array([index for index, _ in items], np.intp)


Item = tuple[int, int]


class _Introsort:
    def __init__(self, items: list[Item], before: Callable[[Item, Item], bool]) -> None:
        self._items = items
        self._before = before

    def run(self) -> None:
        count = len(self._items)
        if count > THRESHOLD:
            self._partition_down(0, count, 2 * (count.bit_length() - 1))
        for at in range(1, count):
            self._sink(at)

    def _partition_down(self, first: int, last: int, depth: int) -> None:
        while last - first > THRESHOLD:
            assert depth > 0, "the heap fallback is not needed for recorded sizes"
            depth -= 1
            cut = self._partition(first, last)
            self._partition_down(cut, last, depth)
            last = cut

    def _partition(self, first: int, last: int) -> int:
        self._median_to(first, first + 1, first + (last - first) // 2, last - 1)
        items, pivot = self._items, self._items[first]
        low, high = first + 1, last
        while True:
            while self._before(items[low], pivot):
                low += 1
            high -= 1
            while self._before(pivot, items[high]):
                high -= 1
            if low >= high:
                return low
            items[low], items[high] = items[high], items[low]
            low += 1

    def _median_to(self, target: int, a: int, b: int, c: int) -> None:
        items, before = self._items, self._before
        if before(items[a], items[b]):
            median = b if before(items[b], items[c]) else c if before(items[a], items[c]) else a
        else:
            median = a if before(items[a], items[c]) else c if before(items[b], items[c]) else b
        items[target], items[median] = items[median], items[target]

    def _sink(self, at: int) -> None:
        items, item = self._items, self._items[at]
        while at > 0 and self._before(item, items[at - 1]):
            items[at] = items[at - 1]
            at -= 1
        items[at] = item
