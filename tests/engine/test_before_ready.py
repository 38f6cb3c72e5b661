"""K8: an engine says that it is ready once its model has run and its transport has been read through."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.before_ready import check_transfers, warm_up
from engine.errors import EngineStartError
from kv_transfer.source import HandoverSource
from kv_transfer.transports import make_transport
from kv_transfer.transports.fake import FakeTransport
from shared_scheduler import EngineType, SchedulerConfig, WaitingPolicy
from tests.engine.pair import tiny_checkpoint
from tests.engine.tiny_engine import TinyModel
from tests.kv_transfer.builders import Pool, identity
from tests.kv_transfer.ends import a_source
from tests.kv_transfer.processes import needs_nixl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("kind", [EngineType.PROMPT, EngineType.COMPLETION, EngineType.NORMAL])
def test_k8_the_model_has_run_a_prompt_and_a_decode_step_before_the_engine_is_ready(
    model: TinyModel, kind: EngineType
) -> None:
    runner = model.gated_runner(16)
    runner.let_run(2)
    settings = SchedulerConfig(
        engine_type=kind,
        max_model_len=60,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        block_size=4,
        num_blocks=16,
        partial_pulls=kind is EngineType.COMPLETION,
    )
    warm_up(runner, settings)
    assert runner.kinds == "PD"


@pytest.mark.parametrize("policy", WaitingPolicy)
def test_every_waiting_policy_starts(model: TinyModel, policy: WaitingPolicy) -> None:
    settings = SchedulerConfig(
        engine_type=EngineType.PROMPT,
        max_model_len=60,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        block_size=4,
        num_blocks=16,
        prefix_cache=True,
        waiting_policy=policy,
    )
    runner = model.gated_runner(16)
    runner.let_run(2)
    warm_up(runner, settings)
    assert runner.kinds == "PD"


@pytest.mark.parametrize("transport", ["zmq", pytest.param("nixl", marks=needs_nixl), "auto"])
@pytest.mark.parametrize("has_source", [True, False])
def test_k8_the_transport_is_read_through_before_the_engine_is_ready(
    transport: str, has_source: bool
) -> None:
    ends = [make_transport(transport) for _ in range(2)]
    if not has_source:
        check_transfers(identity(), Pool().regions, None, ends)
        return
    with a_source(transport) as source:
        check_transfers(identity(), source.pool.regions, source.source, ends)
        assert source.source.stats().num_waiting == 0


def test_k8_an_engine_whose_transport_reads_wrong_bytes_does_not_start() -> None:
    reading = FakeTransport()
    reading.corrupt = set(range(4 * 64))
    with pytest.raises(EngineStartError, match=r"self-test failed: .*not those that were read"):
        check_transfers(identity(), Pool().regions, None, [FakeTransport(), reading])


def test_the_check_ends_where_the_own_source_does_not_know_the_engine() -> None:
    with a_source("fake") as source:
        another = replace(identity(), epoch=2)
        ends = [FakeTransport(), FakeTransport()]
        with pytest.raises(EngineStartError, match=r"self-test failed: .*epoch is 1 there and 2 here"):
            check_transfers(another, source.pool.regions, source.source, ends)


def test_a_source_behind_a_wildcard_address_has_a_local_one(tmp_path: Path) -> None:
    with a_source("fake", "tcp://127.0.0.1:0") as source:
        assert isinstance(source.source, HandoverSource)
        assert source.source.local_address == source.source.control_address
