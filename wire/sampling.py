"""How the tokens of one request are drawn and when the request ends."""

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024

StructureKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form an answer must have.

    `value`: the schema as JSON text (json_schema), a regular expression (regex), a JSON list of the possible
    answers (choice), a grammar in GBNF with the rule `root` (ebnf); empty for json_object.
    """

    kind: StructureKind
    value: str = ""

    def __post_init__(self) -> None:
        if bool(self.value) == (self.kind == "json_object"):
            raise ValueError(f"structured output of kind {self.kind} has the value {self.value!r}")


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
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are out."""
    seed: int = 0
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output contains."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time the output contains the token."""
    repetition_penalty: float = 1.0
    """Divides a positive logit, multiplies a negative one, of tokens in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    structured: StructuredOutput | None = None
    logprobs: int | None = None
    """Number of alternatives reported beside each token's own logprob; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens, each given those before it; they come with output token 0."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """No end-of-sequence or stop token is drawn before the output has this many tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise ValueError(
                f"repetition_penalty must be above 0 and at most 100, got {self.repetition_penalty}"
            )
        if not 0.0 <= self.temperature <= 100.0:
            raise _outside("temperature", self.temperature, 0.0, 100.0)
        if not 0.0 <= self.min_p <= 1.0:
            raise _outside("min_p", self.min_p, 0.0, 1.0)
        if not 0 <= self.seed <= MAX_SEED:
            raise _outside("seed", self.seed, 0, MAX_SEED)
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise _outside("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise _outside("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise _outside("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise _outside("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS:
            raise _outside("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.logit_bias:
            self._check_logit_bias()
        if self.structured is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise ValueError(f"{name} and structured exclude each other: the structure says where it ends")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def depends_on_tokens(self) -> bool:
        """Does what may be drawn depend on the tokens before it by other ways than the model?"""
        return self.structured is not None or self.has_penalties

    def of_choice(self, choice: int) -> "SamplingParams":
        """Sampling of one of several choices of a prompt: a seed of its own, choice 0 keeps this one."""
        return self if choice == 0 else replace(self, seed=choice_seed(self.seed, choice))

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias names {len(self.logit_bias)} tokens, at most {MAX_LOGIT_BIASES} are allowed"
            )
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise _outside(f"logit_bias of token {token_id}", bias, -100.0, 100.0)


def _outside(name: str, value: float, low: float, high: float) -> ValueError:
    return ValueError(f"{name} must be between {low} and {high}, got {value}")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice after the first, a function of both numbers alone."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
