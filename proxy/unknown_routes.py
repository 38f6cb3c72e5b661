"""What is answered where nothing is served: always in OpenAI's error shape, with a code that says why."""

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from proxy.errors import BadRequest
from wire.json_body import to_json
from wire.services import ErrorBody, ServiceError

UNSUPPORTED = (
    "/v1/assistants", "/v1/audio", "/v1/batches", "/v1/containers", "/v1/conversations", "/v1/embeddings",
    "/v1/evals", "/v1/files", "/v1/fine_tuning", "/v1/images", "/v1/moderations", "/v1/realtime",
    "/v1/responses/", "/v1/chat/completions/", "/v1/threads", "/v1/uploads", "/v1/vector_stores",
    "/v1/videos", "/v1/rerank", "/v1/score",
)  # fmt: skip
"""Beginnings of paths of the OpenAI API, and of common extensions, that no model here could serve."""


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    code = None
    message = f"{request.method} {path}: {error.detail}"
    if error.status_code == 404 and path.startswith(UNSUPPORTED):
        code = "unsupported_endpoint"
        message = f"{path} is not served here: this server generates text and stores nothing"
    elif error.status_code == 404:
        code = "unknown_url"
        if path.startswith(("/chat/", "/completions", "/responses", "/models", "/v1/v1/")):
            message += "; a client's base URL has to end with /v1"
    body = ErrorBody(error=ServiceError(message=message, type=BadRequest.error_type, code=code))
    return Response(
        to_json(body), status_code=error.status_code, media_type="application/json", headers=error.headers
    )


async def on_mistake(request: Request, error: Exception) -> Response:
    """A mistake of ours; the server logs the traceback."""
    body = ErrorBody(
        error=ServiceError(
            message="the proxy failed to serve this request", type="server_error", code="internal"
        )
    )
    return Response(to_json(body), status_code=500, media_type="application/json")
