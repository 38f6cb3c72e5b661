import pytest

from tests.kv_transfer.processes import REAL_TRANSPORTS


@pytest.fixture(params=REAL_TRANSPORTS)
def real_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a transport that crosses processes; `nixl-tcp` is NIXL without its same-host copy."""
    name: str = request.param
    if name == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    return name.removesuffix("-tcp")
