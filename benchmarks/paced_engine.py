"""A completion service as it is, before an engine that only counts: a token for every request at each step.

`python -m benchmarks.paced_engine --port P --step-s 0.05 --model NAME`; a NORMAL engine to its proxy.
"""

import argparse
import asyncio
from dataclasses import dataclass

import uvicorn

from completion_service.app import create_app
from engine.ipc import Abort, AddRequest, Command, EngineStats, Ready, RequestOutput
from engine.serving.engine_link import EngineLink, OutputReceiver
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor
from wire.services import OutputToken

FIRST_TOKEN_ID = 1000
"""Of a run of ordinary words in the embedded model's vocabulary."""
NUM_TOKEN_IDS = 500
LONGEST = 1 << 20
STATS = EngineStats(num_waiting=0, num_running=0, num_free_blocks=LONGEST, num_usable_blocks=LONGEST)


@dataclass(slots=True)
class _Running:
    request: AddRequest
    num_tokens: int = 0


class PacedLink(EngineLink):
    """Takes commands like the link to an engine process, and answers them itself."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputReceiver] = {}
        self._running: dict[str, _Running] = {}

    def step(self) -> None:
        """One token for every request."""
        for request_id, running in list(self._running.items()):
            index = running.num_tokens
            running.num_tokens += 1
            is_last = running.num_tokens == running.request.sampling.max_tokens
            token = OutputToken(index=index, token_id=FIRST_TOKEN_ID + index % NUM_TOKEN_IDS)
            receiver = self._streams.get(request_id)
            if is_last:
                del self._running[request_id]
            if receiver is not None:
                receiver.put(
                    RequestOutput(
                        request_id=request_id,
                        tokens=(token,),
                        finish_reason="length" if is_last else None,
                        is_last=is_last,
                    )
                )

    def _send(self, command: Command) -> None:
        match command:
            case AddRequest():
                self._running[command.request_id] = _Running(command)
            case Abort(request_id):
                self._running.pop(request_id, None)


class PacedSupervisor(EngineSupervisor):
    """Says that its engine is ready."""

    def __init__(self, link: PacedLink, model: str) -> None:
        settings = EngineServiceSettings.model_validate({})
        super().__init__(settings, "normal")
        self._link = link
        self.engine = _ready(model)
        self.stats = STATS
        self.config = settings.engine_config("normal", "paced", 1, "", "")
        self.state = "ready"


async def serve(port: int, step_s: float, model: str) -> None:
    link = PacedLink()
    supervisor = PacedSupervisor(link, model)
    app = create_app("normal", supervisor, LONGEST)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve())
    loop = asyncio.get_running_loop()
    next_s = loop.time()
    while not serving.done():
        next_s = max(next_s + step_s, loop.time())
        await asyncio.sleep(next_s - loop.time())
        link.step()


def _ready(model: str) -> Ready:
    return Ready(
        model=model,
        compatibility_hash="benchmark",
        compatibility={},
        control_address=None,
        kernels="torch",
        transport=None,
        max_model_len=LONGEST,
        vocab_size=LONGEST,
        stats=STATS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.step_s, arguments.model))


if __name__ == "__main__":
    main()
