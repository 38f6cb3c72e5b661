"""What engines tell routers about their prefix caches, and how a router names the blocks of a prompt.

A block is named by a hash of its token ids and the name of the block before it; the first one's predecessor
is named by the cache salt. So equal names mean equal prefixes under equal salts, and an engine has cached the
first k blocks of a prompt if and only if it has the k-th of `prompt_block_names`.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TOKEN_BYTES = 4
NAME_BYTES = 8

CacheEventKind = Literal["stored", "removed", "cleared"]


def root_hash(cache_salt: str) -> bytes:
    """What comes before the first block."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=NAME_BYTES).digest()


def chained_hashes(before: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """One hash per full block of `tokens`, int32 ids in native byte order; `before`: the last one's."""
    block_bytes = block_size * TOKEN_BYTES
    hashes: list[bytes] = []
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        before = hashlib.blake2b(before + tokens[end - block_bytes : end], digest_size=NAME_BYTES).digest()
        hashes.append(before)
    return hashes


def prompt_block_names(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[str]:
    """The names of a prompt's full blocks, as they stand in `CacheEvent`."""
    if len(token_ids) < block_size:
        return []
    tokens = array("i", token_ids).tobytes()
    return [each.hex() for each in chained_hashes(root_hash(cache_salt), tokens, block_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """A change of what an engine has cached.

    stored: the blocks `names` follow one another, the first one follows `parent` (None: nothing is said of
    order). removed: the blocks are gone. cleared: nothing is cached any more.
    """

    kind: CacheEventKind
    names: tuple[str, ...] = ()
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents:
    """Answer of `GET /v1/cache/events`: what changed after the reader's last answer.

    A reader sends `epoch` and `next_event` of that answer as `epoch` and `after`. One that is new, has fallen
    too far behind, or knew an earlier start of the engine is told everything: a `cleared` and then what is
    stored now.
    """

    engine_id: str
    epoch: int
    block_size: int
    next_event: int
    events: tuple[CacheEvent, ...]
