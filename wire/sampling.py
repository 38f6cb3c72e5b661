"""How the tokens of one request are drawn and when the request ends."""

import hashlib
from dataclasses import dataclass, replace

MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request, equal on the prompt and the completion engine.

    The sampling noise is a function of (`seed`, output token index) alone, so any engine that holds the
    same tokens continues a request exactly as the first one would have. `ValueError` names the field
    that is out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means no limit."""
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    """Number of alternatives reported beside each token's own logprob; None reports nothing."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be between 0 and {MAX_SEED}, got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {self.logprobs}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def of_choice(self, choice: int) -> "SamplingParams":
        """Sampling of one of several choices of a prompt: a seed of its own, choice 0 keeps this one."""
        return self if choice == 0 else replace(self, seed=choice_seed(self.seed, choice))


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice after the first, a function of both numbers alone."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
