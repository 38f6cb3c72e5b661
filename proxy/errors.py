"""What can end a request at the proxy. Every one of them reaches the client in OpenAI's error shape.

ProxyError
├── BadRequest            400: the client must change the request (also 408 for a body that never comes)
│   ├── ContextExceeded   400: the prompt, or what is asked for, does not fit the context
│   ├── UnknownModel      404
│   ├── BodyTooLarge      413
│   └── WrongKey          401
├── NotServing            503: draining, or no engines that could serve it
├── Overloaded            429: the queue, the deadline or the key's limits; says when to come back
├── RequestTimeout        504: the request's own deadline has passed
└── EngineFailure         one leg failed; `role` and `reason` are metric labels
    ├── EngineUnreachable 503: no connection
    ├── EngineBroke       502: a connection that ended early, an answer outside the protocol
    ├── EngineTooSlow     504: the proxy gave up waiting
    ├── EngineLeaves      503: it drains, its streams are moved
    └── EngineRefused     the engine's own status and error object
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus

from wire.services import EngineRole, ErrorBody, FinishReason, ServiceError


class ProxyError(Exception):
    """An error with the HTTP status and the OpenAI error object that tell the client about it."""

    status = 500
    error_type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.error = ServiceError(message=message, type=self.error_type, param=param, code=code or self.code)
        self.headers: dict[str, str] = {}

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(error=self.error)


class BadRequest(ProxyError):
    status = 400
    error_type = "invalid_request_error"


class ContextExceeded(BadRequest):
    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, field: str, limit: int, num_prompt_tokens: int | str) -> "ContextExceeded":
        return cls(
            f"this model's maximum context length is {limit} tokens, and the prompt alone has "
            f"{num_prompt_tokens}; please shorten {field}",
            param=field,
        )


class UnknownModel(BadRequest):
    status = 404
    code = "model_not_found"


class BodyTooLarge(BadRequest):
    status = 413
    code = "request_too_large"


class WrongKey(BadRequest):
    status = 401
    code = "invalid_api_key"


class BodyTooSlow(BadRequest):
    status = 408
    code = "request_timeout"


class NotServing(ProxyError):
    status = 503
    error_type = "service_unavailable"
    code = "no_engine_available"


class Overloaded(ProxyError):
    """Not now; `reason` is a metric label, and the client is told when to come back."""

    status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, reason: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))


class RequestTimeout(ProxyError):
    status = 504
    code = "request_timeout"


class EngineFailure(ProxyError):
    """A leg failed; `reason` is a short word for metrics."""

    status = 502
    reason = "failed"
    was_taken = True
    """The engine may have worked on the request before it failed."""

    def __init__(self, role: EngineRole, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.role = role

    @property
    def may_pass_elsewhere(self) -> bool:
        """It is not the request's own fault: other engines may well serve it."""
        return self.status >= 500 and self.error.code not in _OWN_FAULTS

    @property
    def is_out_of_room(self) -> bool:
        """The engine is well, but full: it ended the request, or never found room for its KV blocks."""
        return self.error.code in _OUT_OF_ROOM

    @property
    def is_draining(self) -> bool:
        """The engine is well, but its service ends soon."""
        return self.error.code == EngineLeaves.code

    @property
    def leaves_handover(self) -> bool:
        """Said by a completion engine before its first token: the prompt engine may still keep the prompt."""
        if self.role != "completion" or self.error.code in _OWN_FAULTS:
            return False
        if self.is_of_handover or self.is_out_of_room:
            return self.error.code == "handover_no_room"
        return self.status >= 500 or self.status == HTTPStatus.TOO_MANY_REQUESTS

    @property
    def kind(self) -> str:
        """What happened, as a metric's label."""
        if self.is_out_of_room:
            return "out_of_room"
        if self.is_draining:
            return EngineLeaves.reason
        return "handover" if self.is_of_handover else self.reason

    @property
    def is_of_handover(self) -> bool:
        """The two engines could not pass the KV blocks on; only completion engines notice."""
        return (self.error.code or "").startswith("handover_")

    @property
    def is_of_recomputed_prompt(self) -> bool:
        """The prompt engine took blocks back and computes them again: both engines are well."""
        return self.error.code == "handover_superseded"


class EngineUnreachable(EngineFailure):
    status = 503
    error_type = "service_unavailable"
    code = "engine_unreachable"
    reason = "unreachable"
    was_taken = False
    is_slow = False
    """The connection was not refused: it did not come about in time."""

    @classmethod
    def because(cls, role: EngineRole, reason: str, *, is_slow: bool) -> "EngineUnreachable":
        failure = cls(role, f"the {role} engine cannot be reached: {reason}")
        failure.is_slow = is_slow
        return failure


class EngineBroke(EngineFailure):
    status = 502
    code = "engine_failed"
    reason = "broken"


class EngineTooSlow(EngineFailure):
    status = 504
    code = "engine_timeout"
    reason = "timeout"


class EngineLeaves(EngineFailure):
    status = 503
    error_type = "service_unavailable"
    code = "engine_draining"
    reason = "draining"
    was_taken = False


class EngineRefused(EngineFailure):
    """The engine said no; its status and error object are the client's."""

    reason = "refused"

    def __init__(
        self, role: EngineRole, status: int, error: ServiceError, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(role, error.message)
        self.status = status
        self.error = error
        self.headers = dict(headers or {})
        if (self.is_of_handover and status < 500) or status == HTTPStatus.UNAUTHORIZED:
            # Engines blame each other for a failed hand-over, and the proxy for a wrong service token; it is
            # never the client's mistake.
            self.status = EngineBroke.status
            self.error = replace(error, type=self.error_type, param=None)


_OUT_OF_ROOM = frozenset({"insufficient_system_resource", "handover_no_room"})
_OWN_FAULTS = frozenset({"structured_output_failed", "vision_encoder_failed"})

_STATUS_BY_FINISH: dict[FinishReason, tuple[int, str]] = {
    "abort": (503, "the engine aborted the request"),
    "prompt_length_exceeded": (400, "the prompt is longer than the engine takes"),
    "insufficient_system_resource": (503, "the engine ran out of KV blocks for this request"),
    "structured_output_failed": (502, "the engine could not follow the requested structure"),
    "vision_encoder_failed": (502, "the engine's vision encoder failed"),
    "handover_withdrawn": (502, "the hand-over of the request was withdrawn"),
    "error": (502, "the engine failed while it generated"),
}


def failure_from_finish(role: EngineRole, reason: FinishReason) -> EngineRefused:
    """The error for a finish reason that no client should see as an ordinary end."""
    status, message = _STATUS_BY_FINISH[reason]
    is_client_error = status < 500
    return EngineRefused(
        role,
        status,
        ServiceError(
            message=message,
            type="invalid_request_error" if is_client_error else "server_error",
            code="context_length_exceeded" if is_client_error else reason,
        ),
    )


def refused_at_once(
    role: EngineRole, status: int, error: ServiceError, headers: Mapping[str, str]
) -> EngineRefused:
    """The error for a status line other than 200: the engine has not begun with the request."""
    failure = EngineRefused(role, status, error, headers)
    failure.was_taken = False
    return failure


def failure_from_event(role: EngineRole, error: ServiceError, status: int | None) -> EngineRefused:
    """The error for an `error` event in a completion stream, with the status the engine gave it."""
    return EngineRefused(role, status or EngineBroke.status, error)
