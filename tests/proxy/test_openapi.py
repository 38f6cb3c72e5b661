"""The published document is true: for every route there is, and for whatever schemathesis makes of it."""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from proxy.app import create_app
from proxy.openapi import OPERATIONS, PAGE_FILES, openapi_document
from proxy.settings import ProxySettings
from tests.proxy.builders import Answering, stack, text_model
from tests.proxy.mock_engines import MockEngine

SCHEMA = schemathesis.openapi.from_dict(openapi_document("0"))
NUM_EXAMPLES = 150 if os.environ.get("TANDEM_HYPOTHESIS") == "soak" else 4
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def test_every_route_is_described() -> None:
    app = create_app(ProxySettings(), text_model())
    described = {(operation.method.upper(), operation.path) for operation in OPERATIONS}
    served = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route) and route.path not in ("/openapi.json", *PAGE_FILES)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == described


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A proxy and its mock engines, in an event loop of their own: schemathesis calls without one."""
    started: Future[str] = Future()
    stopping = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        answering = Answering("ok")
        engines = [MockEngine("prompt", answering.prompt), MockEngine("completion", answering.completion)]
        for engine in engines:
            engine.info = replace(engine.info, max_model_len=4096)
        async with stack(*engines) as running:
            started.set_result(running.url)
            await stopping.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield started.result(timeout=30)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(timeout=30)
        loop.close()


@SCHEMA.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case: schemathesis.Case, url: str) -> None:
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=30)
