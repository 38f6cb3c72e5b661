"""What can end a request on the HTTP side of a service.

ServiceFailure            answered with its status and an OpenAI-shaped body
├── InvalidRequest        400: the body cannot be served by this engine, ever
├── EngineUnavailable     503: loading, draining, restarting or lost in mid-request
└── EngineRefused         the status the engine itself gave for this request
ServiceStartError         the process cannot start; one line that says what to do
"""

from wire.services import ErrorBody, ServiceError


class ServiceFailure(Exception):
    status = 500
    error_type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.error = ServiceError(message=message, type=self.error_type, param=param, code=code)

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(error=self.error)


class InvalidRequest(ServiceFailure):
    status = 400
    error_type = "invalid_request_error"


class EngineUnavailable(ServiceFailure):
    status = 503
    error_type = "service_unavailable"


class EngineRefused(ServiceFailure):
    def __init__(self, status: int, error: ServiceError) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


class ServiceStartError(Exception):
    pass
