"""The proxy that everybody writes first, to be compared with: FastAPI in front, a stock httpx client behind.

`python -m benchmarks.obvious_proxy --port P --engine-url URL`
"""

import argparse
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def create_app(engine_url: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=engine_url, timeout=None, limits=limits, trust_env=False)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            whole = await client.post("/v1/completions", json=body)
            return Response(whole.content, whole.status_code, media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for chunk in answer.aiter_bytes():
                    yield chunk

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-url", required=True)
    arguments = parser.parse_args()
    uvicorn.run(create_app(arguments.engine_url), port=arguments.port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
