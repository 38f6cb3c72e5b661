"""What engines and routes are called towards clients."""

from dataclasses import replace

from proxy.errors import EngineFailure, EngineRefused
from proxy.openai_types import ChatRequest, TextRequest
from proxy.pairing import Pair, Route, Single
from proxy.single_legs import SingleLeg


def kind_of(route: Route | SingleLeg) -> str:
    match route:
        case Pair():
            return "pair"
        case Single():
            return "normal"
        case _:
            return "leg"


def in_client_terms(failure: EngineFailure, request: ChatRequest | TextRequest) -> EngineFailure:
    """Engines name the fields of their own bodies; clients know others."""
    if isinstance(failure, EngineRefused) and failure.error.param is not None:
        names = {
            "prompt_token_ids": request.prompt_field,
            "max_tokens": request.asked_max_tokens[0],
            "structured": request.structured_field,
        }
        param = failure.error.param.removeprefix("sampling.")
        param = names.get(param, param)
        failure.error = replace(failure.error, param=param)
    return failure
