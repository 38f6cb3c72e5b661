"""What an engine does before it says that it is ready, so that the first request is not the slow one.

1. warm_up             a prompt and a decode step of the real model, on a scheduler that is then forgotten
2. check_transfers     reads through the transport, from this process's own source, as a peer would
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.errors import EngineStartError
from engine.handover_role import NoHandover
from engine.ipc import AddRequest
from engine.llm_engine import LLMEngine
from engine.model_runner import Runner
from engine.sampler import Sampler
from kv_transfer.events import Failed
from kv_transfer.layout import Identity, Region
from kv_transfer.settings import TransferSettings
from kv_transfer.sink import HandoverSink
from kv_transfer.source import HandoverSource
from kv_transfer.transport import Transport
from shared_scheduler import EngineType, Scheduler, SchedulerConfig, WaitingPolicy
from wire.sampling import SamplingParams
from wire.services import PromptEngineAddress

logger = logging.getLogger(__name__)

NUM_WARM_UP_TOKENS = 32
MAX_WARM_UP_STEPS = 64
CHECK_TIMEOUT_S = 20.0
CHECK_SETTINGS = TransferSettings(connect_timeout_s=10.0, self_test_timeout_s=10.0)
"""Patient: engines of a host start together. A same-host read shows no RDMA lane, so none is required."""


def warm_up(runner: Runner, settings: SchedulerConfig, sampler: Sampler | None = None) -> float:
    """Answer a short prompt; returns the seconds it took. The pool's blocks are all free again afterwards."""
    began_s = time.monotonic()
    alone = replace(
        settings,
        engine_type=EngineType.NORMAL,
        prefill_attempt_interval=1,
        prefill_any_attempt_interval=1,
        waiting_policy=WaitingPolicy.FCFS,  # others ask the prefix cache
        test_retract_interval=None,
        admission_estimate=False,
        max_num_draft_tokens=0,
        partial_pulls=False,
        prefix_cache=False,
        cache_events=False,
    )
    scheduler = Scheduler(alone)
    engine = LLMEngine(scheduler, runner, sampler or Sampler(), NoHandover(scheduler))
    num_tokens = min(NUM_WARM_UP_TOKENS, settings.max_num_batched_tokens, settings.max_model_len - 2)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    if num_tokens < 1:
        return 0.0
    engine.add(AddRequest(request_id="warm-up", prompt_token_ids=(0,) * num_tokens, sampling=sampling))
    for _ in range(MAX_WARM_UP_STEPS):
        if any(output.is_last for output in (*engine.poll(), *engine.step())):
            break
    else:
        raise EngineStartError(f"the model did not answer a prompt of {num_tokens} tokens")
    took_s = time.monotonic() - began_s
    logger.info("warmed up in %.2f s", took_s)
    return took_s


def check_transfers(
    identity: Identity,
    regions: Sequence[Region],
    source: HandoverSource | None,
    transports: Sequence[Transport],
) -> None:
    """Greet a source of this process and read its scratch memory.

    `source`: the engine's own; where it has none, another that lives as long as the check. `transports`: new
    ones, for a source and a sink. `EngineStartError` if nothing can be read.
    """
    happened = threading.Event()
    served, reading = transports
    own = source or HandoverSource(
        identity, regions, served, "tcp://127.0.0.1:0", CHECK_SETTINGS, lambda: None
    )
    checker = replace(identity, engine_id=f"{identity.engine_id}-self-test")
    sink = HandoverSink(checker, regions, reading, CHECK_SETTINGS, happened.set)
    try:
        address = PromptEngineAddress(
            engine_id=identity.engine_id, epoch=identity.epoch, control_address=own.local_address
        )
        sink.request("self-test", address)
        _until_ready(sink, happened)
        sink.abandon("self-test")
    finally:
        sink.close()
        if source is None:
            own.close()


def _until_ready(sink: HandoverSink, happened: threading.Event) -> None:
    until_s = time.monotonic() + CHECK_TIMEOUT_S
    while not sink.stats().num_peers:
        happened.wait(0.01)
        for event in sink.events():
            if isinstance(event, Failed):
                raise EngineStartError(f"the transport's self-test failed: {event.message}")
        if time.monotonic() >= until_s:
            raise EngineStartError(f"the transport's self-test did not end in {CHECK_TIMEOUT_S:g} s")
