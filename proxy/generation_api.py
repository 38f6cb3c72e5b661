"""What an endpoint that generates consists of, apart from what all of them have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.answers import AnswerShape
from proxy.client import Client
from proxy.openai_responses import Usage
from proxy.openai_types import ChatRequest, TextRequest


class AnswerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is made with."""

    client: Client
    request_id: str
    created: int
    """Unix time."""
    usage: Callable[[], Usage]
    """Of what has been generated so far."""
    extras: Mapping[str, Any]
    """Fields of a whole answer beside those of the API, known when it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationApi:
    """What sets one generation endpoint apart: its body and the shape of its answers."""

    path: str
    parse: Callable[[bytes], ChatRequest | TextRequest]
    answer: Callable[[ChatRequest | TextRequest, AnswerContext], AnswerShape]
