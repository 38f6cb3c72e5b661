"""Small values the tests of the HTTP half are made of."""

from engine.ipc import AddRequest, EngineStats, Ready, RequestOutput
from wire.sampling import SamplingParams
from wire.services import FinishReason, OutputToken

STATS = EngineStats(num_waiting=0, num_running=0, num_free_blocks=7, num_usable_blocks=7)


def ready(max_model_len: int = 16, vocab_size: int = 100) -> Ready:
    return Ready(
        model="m",
        compatibility_hash="h",
        compatibility={},
        control_address=None,
        kernels="torch",
        transport=None,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        stats=STATS,
    )


def add(request_id: str = "a") -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))


def token_output(request_id: str, index: int, *, is_last: bool = False) -> RequestOutput:
    token = OutputToken(index=index, token_id=10 + index)
    reason: FinishReason | None = "length" if is_last else None
    return RequestOutput(request_id=request_id, tokens=(token,), finish_reason=reason, is_last=is_last)
