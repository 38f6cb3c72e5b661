"""Random numbers as a pure function of a request's seed and an output token's index.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): no state to keep,
to move between engines or to share in a batch.
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = npt.NDArray[np.uint64]
"""32-bit words in 64-bit integers."""


def uniform_noise(
    seed: npt.NDArray[np.int64], output_index: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """One number per row, strictly between 0 and 1 and a multiple of 2^-51."""
    key = seed.astype(np.uint64)
    zero = np.zeros_like(key)
    words = philox((output_index.astype(np.uint64), zero, zero, zero), (key & _LOW, key >> _WORD_BITS))
    bits = (words[0] << np.uint64(18)) | (words[1] >> np.uint64(14))
    return (bits.astype(np.float64) + 0.5) * 2.0**-50


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """The four output words for each element of four counter and two key arrays of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
