"""Where a service token is configured, callers must show it; health and metrics stay open for probes."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.serving.app import error_response
from settings.secret_keys import SecretKeys, bearer_token
from wire.services import ErrorBody, ServiceError

OPEN = ("/health", "/metrics")


@dataclass(frozen=True, slots=True)
class ServiceTokenCheck:
    """ASGI middleware that answers 401 to whoever does not know the token."""

    app: ASGIApp
    tokens: SecretKeys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_closed(scope):
            error = ServiceError(
                message="no service token, or a wrong one; see --service-token-file",
                type="invalid_request_error",
                code="invalid_service_token",
            )
            headers = {"www-authenticate": "Bearer", "connection": "close"}
            await error_response(401, ErrorBody(error=error), headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_closed(self, scope: Scope) -> bool:
        if not self.tokens.is_required or scope["path"].startswith(OPEN):
            return False
        given = bearer_token(scope["headers"])
        return given is None or not self.tokens.accept(given)
