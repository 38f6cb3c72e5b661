"""Limits a request must keep before it is given to the engine."""

from engine.ipc import Ready
from engine.serving.errors import InvalidRequest
from wire.sampling import SamplingParams


def check_limits(
    engine: Ready,
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    num_replayed_tokens: int = 0,
) -> None:
    """Raise `InvalidRequest` naming the field when this engine could never serve the request."""
    num_prompt_tokens = len(prompt_token_ids) - num_replayed_tokens
    if not prompt_token_ids:
        raise InvalidRequest("prompt_token_ids must not be empty", param="prompt_token_ids")
    if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < engine.vocab_size:
        raise InvalidRequest(
            f"prompt_token_ids must lie in [0, {engine.vocab_size})", param="prompt_token_ids"
        )
    if num_prompt_tokens >= engine.max_model_len:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens; this engine takes prompt and completion together "
            f"up to {engine.max_model_len} (--max-model-len)",
            param="prompt_token_ids",
            code="context_length_exceeded",
        )
    if num_prompt_tokens + sampling.max_tokens > engine.max_model_len:
        raise InvalidRequest(
            f"{num_prompt_tokens} prompt tokens and max_tokens {sampling.max_tokens} exceed the "
            f"{engine.max_model_len} tokens this engine takes (--max-model-len)",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if any(not 0 <= token_id < engine.vocab_size for token_id in sampling.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids must lie in [0, {engine.vocab_size})", param="stop_token_ids")
    if any(not 0 <= token_id < engine.vocab_size for token_id, _ in sampling.logit_bias):
        raise InvalidRequest(f"logit_bias must name tokens in [0, {engine.vocab_size})", param="logit_bias")
