"""Device copies that a step needs before it runs."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Copies:
    """Executed before the step, clones first, then zeroes.

    Clones are (src, dst); dst = 0 means that src was given back and nothing is copied.
    """

    clone_blocks: list[tuple[int, int]] = field(default_factory=list)
    clone_states: list[tuple[int, int]] = field(default_factory=list)
    zero_states: list[int] = field(default_factory=list)


NO_COPIES = Copies()
"""What most steps need; shared, so never add to it."""
