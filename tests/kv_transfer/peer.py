"""A second process for tests: `python -m tests.kv_transfer.peer JSON` prints one JSON line per event.

Modes: `memory` serves a pool through a bare transport; `source` and `sink` run the real hand-over ends.
Commands come as JSON lines on standard input: `["offer", id, num_tokens, block_ids]`, `["withdraw", id]`,
`["request", id, engine_id, epoch, control_address]`, `["pull", id, block_ids]`, `["holds", ids, source_ids]`,
`["abandon", id]`, `["decline", id]`, `["clear"]`, `["echo"]`. It ends with its
standard input.
"""

import dataclasses
import json
import sys
import threading
from typing import TypedDict

from kv_transfer.events import Failed
from kv_transfer.offers import Offer
from kv_transfer.settings import TransferSettings
from kv_transfer.sink import HandoverSink
from kv_transfer.source import HandoverSource
from kv_transfer.transports import make_transport
from tests.kv_transfer.builders import FIRST, Pool, identity
from wire.services import PromptEngineAddress


class Setup(TypedDict):
    mode: str
    transport: str
    address: str
    epoch: int
    lease_s: float
    num_blocks: int
    block_bytes: int
    verify_kv: bool
    is_quick: bool
    """Gives up soon."""


def settings_of(setup: Setup) -> TransferSettings:
    settings = TransferSettings(lease_s=setup["lease_s"], verify_kv=setup["verify_kv"])
    return dataclasses.replace(settings, **QUICK) if setup["is_quick"] else settings


QUICK = {
    "connect_timeout_s": 1.0,
    "refused_timeout_s": 0.2,
    "offer_timeout_s": 3.0,
    "read_timeout_s": 1.0,
    "confirm_timeout_s": 1.0,
    "fence_after_s": 1.0,
    "self_test_timeout_s": 1.0,
    "breaker_pause_s": 0.02,
    "breaker_max_pause_s": 0.1,
}


_saying = threading.Lock()
"""Events come from a pump thread, answers from the main one."""


def say(*items: object) -> None:
    with _saying:
        print(json.dumps(items), flush=True)


def serve_memory(setup: Setup, pool: Pool) -> None:
    transport = make_transport(setup["transport"])
    blob = transport.register(pool.regions, setup["address"])
    say("ready", blob.hex(), [dataclasses.astuple(region) for region in pool.regions], setup["address"])
    for line in sys.stdin:
        say(*json.loads(line))
    transport.close()


def serve_source(setup: Setup, pool: Pool) -> None:
    source: HandoverSource | None = None

    def report() -> None:
        for event in source.events() if source is not None else []:
            say(type(event).__name__, event.handover_id, event.reason)

    source = HandoverSource(
        identity("prompt-0", setup["epoch"]),
        pool.regions,
        make_transport(setup["transport"]),
        setup["address"],
        settings_of(setup),
        report,
    )
    say("ready", source.control_address)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "offer":
            handover_id, num_tokens, block_ids = arguments
            source.offer(Offer(handover_id, num_tokens, block_ids, None, FIRST))
        elif name == "withdraw":
            source.withdraw(*arguments)
        else:
            say(name)
    source.close()


def serve_sink(setup: Setup, pool: Pool) -> None:
    sink: HandoverSink | None = None

    def report() -> None:
        for event in sink.events() if sink is not None else []:
            is_safe = (event.blocks_safe,) if isinstance(event, Failed) else ()
            say(type(event).__name__, event.handover_id, *is_safe)

    sink = HandoverSink(
        identity("completion-0", setup["epoch"]),
        pool.regions,
        make_transport(setup["transport"]),
        settings_of(setup),
        report,
    )
    say("ready", "")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "request":
            handover_id, engine_id, epoch, control_address = arguments
            sink.request(
                handover_id,
                PromptEngineAddress(engine_id=engine_id, epoch=epoch, control_address=control_address),
            )
        elif name == "pull":
            sink.pull(*arguments)
        elif name == "abandon":
            sink.abandon(*arguments)
        elif name == "decline":
            sink.decline(*arguments)
        elif name == "holds":
            say("holds", pool.holds(*arguments))
        elif name == "clear":
            pool.kv[:] = 0
        else:
            say(name)
    sink.close()


def main() -> None:
    setup: Setup = json.loads(sys.argv[1])
    pool = Pool(setup["num_blocks"], setup["block_bytes"])
    if setup["mode"] == "sink":
        serve_sink(setup, pool)
    elif setup["mode"] == "source":
        serve_source(setup, pool.fill())
    else:
        serve_memory(setup, pool.fill())


if __name__ == "__main__":
    main()
