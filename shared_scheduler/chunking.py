"""How long the next chunk of a prompt is: pure functions of positions."""

from dataclasses import dataclass

from shared_scheduler.rows import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRules:
    """Where a prompt may be cut."""

    alignment: int = 1
    """A cut chunk is a multiple of this."""
    min_chunk: int = 1
    may_cut: bool = True
    image_pad: int | None = None
    image_start: int | None = None


def chunk_length(
    token_ids: Int32Array, start: int, room: int, rules: CutRules, checkpoint: int | None = None
) -> int:
    """Tokens of the chunk that begins at `start` when `room` tokens are left in the step; 0: it must wait.

    The whole rest is taken if it fits. Otherwise the cut falls on an alignment boundary, at `checkpoint` if
    that comes first, and never inside the pads of an image. A checkpoint nearer than the shortest chunk is
    passed over: a piece that small could never run.
    """
    end = len(token_ids)
    room = room // rules.alignment * rules.alignment
    length = min(end - start, room)
    if length < end - start and not rules.may_cut:
        return 0
    if checkpoint is not None and start + rules.min_chunk <= checkpoint <= start + length:
        length = checkpoint - start
    if length == end - start:
        return length
    cut = _before_image(token_ids, start, start + length, rules)
    if cut < rules.min_chunk:
        cut = _after_image(token_ids, start, start + length, rules)
    return cut if cut <= room and (cut >= rules.min_chunk or cut == end - start) else 0


def _before_image(token_ids: Int32Array, start: int, cut: int, rules: CutRules) -> int:
    """Longest permitted chunk that ends at or before `cut`."""
    while cut > start and cut < len(token_ids):
        cut -= (cut - start) % rules.alignment
        if not _is_inside_image(token_ids, cut, rules):
            break
        while cut > start and token_ids[cut - 1] == rules.image_pad:
            cut -= 1
        if cut > start and token_ids[cut - 1] == rules.image_start:
            cut -= 1
    return max(cut - start, 0)


def _after_image(token_ids: Int32Array, start: int, cut: int, rules: CutRules) -> int:
    """Shortest permitted chunk that ends at or after `cut`."""
    end = len(token_ids)
    while cut < end:
        cut = min(cut + (start - cut) % rules.alignment, end)
        if not _is_inside_image(token_ids, cut, rules):
            break
        while cut < end and token_ids[cut] == rules.image_pad:
            cut += 1
    return cut - start


def _is_inside_image(token_ids: Int32Array, cut: int, rules: CutRules) -> bool:
    """Would a cut before token `cut` part an image's pads from each other or from their start marker?"""
    if rules.image_pad is None or not 0 < cut < len(token_ids):
        return False
    return bool(token_ids[cut] == rules.image_pad) and bool(
        token_ids[cut - 1] == rules.image_pad or token_ids[cut - 1] == rules.image_start
    )
