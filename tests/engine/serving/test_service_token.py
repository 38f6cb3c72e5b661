"""An engine's service answers 401 to callers without its token, where it has one."""

import httpx
import pytest
from fastapi import FastAPI

from engine.serving.service_token import ServiceTokenCheck
from settings.secret_keys import SecretKeys


def client(*tokens: str) -> httpx.AsyncClient:
    app = FastAPI()
    app.add_middleware(ServiceTokenCheck, tokens=SecretKeys(tokens))
    for path in ("/info", "/health/ready", "/metrics"):
        app.add_api_route(path, lambda: {})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic right", "right"])
async def test_a_wrong_token_is_401_but_probes_are_answered(authorization: str | None) -> None:
    async with client("right", "next") as http:
        headers = {} if authorization is None else {"authorization": authorization}
        refused = await http.get("/info", headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_service_token"
        for path in ("/health/ready", "/metrics"):
            assert (await http.get(path, headers=headers)).status_code == 200


async def test_each_token_is_good_and_without_any_all_are_welcome() -> None:
    async with client("right", "next") as http:
        for token in ("right", "next"):
            good = await http.get("/info", headers={"authorization": f"Bearer {token}"})
            assert good.status_code == 200
    async with client() as http:
        assert (await http.get("/info")).status_code == 200
