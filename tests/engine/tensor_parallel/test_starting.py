"""Ranks that do not come to load, and pools that do not fit together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from engine import kv_pool
from engine.errors import EngineStartError, KVPoolError, TensorParallelError
from engine.tensor_parallel import ranks as ranks_module
from engine.tensor_parallel import runner as runner_module
from engine.tensor_parallel.messages import RankConfig
from engine.tensor_parallel.ranks import RankProcesses
from engine.tensor_parallel.runner import RankOptions, make_pools
from model_files import resolve_model
from shared_scheduler import GroupError
from tests.engine.tensor_parallel.engines import Engine, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "Llama")


def rank_config(ranks: RankProcesses) -> RankConfig:
    return RankConfig(
        rank=1,
        size=2,
        model="none",
        weight_format="fp32",
        kernels="torch",
        max_positions=1,
        block_size=1,
        num_blocks=2,
        num_threads=1,
        pool_fd=0,
        store_port=1,
        timeout_s=1.0,
        step_endpoint=ranks.step_endpoint(1),
        report_endpoint=ranks.report_endpoint,
        log_level="info",
    )


def test_a_rank_that_never_reports_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects nowhere, so not even the request to stop can be sent."""
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(ranks_module, "_spawn", lambda config: subprocess.Popen(silent))
    monkeypatch.setattr(ranks_module, "LOAD_WAIT_S", 0.2)
    monkeypatch.setattr(ranks_module, "STOP_WAIT_S", 0.2)
    ranks = RankProcesses(lambda: None)
    ranks.start([rank_config(ranks)])
    (pid,) = ranks.process_ids
    with pytest.raises(TensorParallelError, match=r"rank 1 of --tp 2 did not start within 0\.2 s"):
        ranks.wait_until_here()
    ranks.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_dies_while_all_connect_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RankProcesses] = []

    class Watched(RankProcesses):
        def wait_until_here(self) -> None:
            super().wait_until_here()
            started.append(self)

    def connect(*_: object, **__: object) -> NoReturn:
        os.kill(started[0].process_ids[0], signal.SIGKILL)
        raise GroupError("the connection was closed")

    monkeypatch.setattr(runner_module, "RankProcesses", Watched)
    monkeypatch.setattr(runner_module.RankCollectives, "connect", connect)
    began_s = time.monotonic()
    with pytest.raises(EngineStartError, match="rank 1 of the engine has ended with code -9"):
        Engine(checkpoint, tp=2)
    assert time.monotonic() - began_s < 30.0


def test_the_pools_of_all_ranks_must_fit_the_free_memory_together(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RankOptions(
        model=str(checkpoint),
        size=2,
        weight_format="fp32",
        kernels="torch",
        block_size=4,
        kv_bytes=4 << 20,
        max_model_len=None,
        num_threads=1,
        timeout_s=1.0,
        log_level="info",
    )
    config = resolve_model(str(checkpoint)).config()
    monkeypatch.setattr(kv_pool, "_available_bytes", lambda: 3 << 20)
    with pytest.raises(KVPoolError, match=r"the KV pool of all ranks of 4193280 bytes .* lower --kv-bytes"):
        make_pools(config, options)
