"""The process of one rank beyond the first: `python -m engine.tensor_parallel.worker`.

1. connect    to the other ranks, at the store whose port it was told
2. load       its part of the weights, over its slice of the KV pool
3. step       compute whatever rank 0 sends, in order, until it is told to stop or a rank is lost
"""

import logging
import os
import signal
import sys

import msgspec
import torch
import zmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but the stubs do not say so

from engine.errors import EngineError
from engine.kv_pool import KVLayout, KVPool
from engine.model.linear import check_weight_format
from engine.model.shards import Shard, local_config
from engine.model_runner import ModelRunner
from engine.native.library import choose_runtime
from engine.tensor_parallel.collectives import LOOPBACK, RankCollectives
from engine.tensor_parallel.loading import load_shard
from engine.tensor_parallel.messages import (
    Failed,
    Here,
    Loaded,
    RankConfig,
    Step,
    StepBatch,
    Stop,
    ToFirst,
    decode_to_rank,
    encode,
)
from kv_transfer.memory import SharedRegion
from model_files.errors import ModelFilesError
from model_files.resolve import resolve_model
from processes.child import die_with_parent
from processes.heap import keep_freed_memory
from shared_scheduler import GroupError


def main() -> int:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the engine decides
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RankConfig)
    logging.basicConfig(
        level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s rank {config.rank}: %(message)s"
    )
    context = zmq.Context()
    reports = context.socket(zmq.PUSH)
    reports.setsockopt(zmq.LINGER, 1000)
    reports.connect(config.report_endpoint)
    steps = context.socket(zmq.PULL)
    steps.connect(config.step_endpoint)

    def report(message: ToFirst) -> None:
        reports.send(encode(message))

    exit_code = 0
    report(Here(config.rank))
    try:
        runner = load_rank(config)
        report(Loaded(config.rank))
        serve(runner, steps)
    except (EngineError, ModelFilesError, GroupError) as error:
        report(Failed(config.rank, str(error)))
        exit_code = 1
    for socket in (steps, reports):
        socket.close()
    context.term()
    return exit_code


def load_rank(config: RankConfig) -> ModelRunner:
    """This rank's part of the model, connected to the others."""
    keep_freed_memory()
    torch.set_num_threads(config.num_threads)
    shard = Shard(config.rank, config.size)
    store = TCPStore(LOOPBACK, config.store_port, is_master=False, wait_for_workers=False)
    collectives = RankCollectives.connect(
        store, config.rank, config.size, timeout_s=config.timeout_s, device=torch.device("cpu")
    )
    files = resolve_model(config.model)
    local = local_config(files.config(), shard)
    layout = KVLayout.of(local, config.block_size)
    memory = SharedRegion.attach(config.pool_fd, config.num_blocks * layout.block_bytes)
    model, attention = load_shard(
        files,
        check_weight_format(config.weight_format),
        runtime=choose_runtime(config.kernels, local, config.num_threads),
        max_positions=config.max_positions,
        num_threads=config.num_threads,
        shard=shard,
        collectives=collectives,
    )
    return ModelRunner(model, local, KVPool(layout, config.num_blocks, memory), attention)


def serve(runner: ModelRunner, steps: "zmq.Socket[bytes]") -> None:
    """Until told to stop; `GroupError` when a rank is lost in mid-step."""
    while True:
        match decode_to_rank(steps.recv()):
            case Step() as step:
                batch = StepBatch(step)
                runner.forward(batch, batch.logit_rows)
            case Stop():
                return


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
