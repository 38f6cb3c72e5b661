"""Several workers behind one port: shared counts, one /metrics, one that dies."""

import asyncio
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from proxy.errors import Overloaded
from proxy.key_limits import KeyLimits
from proxy.workers.merged_metrics import MergedMetrics, encode_samples
from proxy.workers.peers import Peers
from proxy.workers.shared_key_use import NUM_PROBES, NUM_SLOTS, SharedKeyUse, create_table
from tests.proxy.builders import until
from tests.proxy.test_main import MODEL, RunningProxy, proxy_process


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_table(tmp_path)
    return tmp_path


def two_workers(directory: Path, limits: KeyLimits) -> tuple[Clock, SharedKeyUse, SharedKeyUse]:
    clock = Clock()
    return clock, SharedKeyUse(limits, clock, directory, 0), SharedKeyUse(limits, clock, directory, 1)


def test_a_key_may_have_as_many_requests_open_at_all_workers_together(directory: Path) -> None:
    _, first, second = two_workers(directory, KeyLimits(max_open=2))
    with first.open("a"), second.open("a"):
        with pytest.raises(Overloaded, match="2 requests open"), first.open("a"):
            pass
        with second.open("b"):
            pass
    with first.open("a"), first.open("a"):
        pass
    first.check_invariants()
    second.check_invariants()


def test_a_rate_is_that_of_all_workers_together(directory: Path) -> None:
    clock, first, second = two_workers(directory, KeyLimits(requests_per_s=0.5, burst=2))
    for worker in (first, second):
        with worker.open("a"):
            pass
    with pytest.raises(Overloaded), first.open("a"):
        pass
    clock.now_s += 2.0
    with second.open("a"):
        pass
    with pytest.raises(Overloaded), first.open("a"):
        pass


def test_what_a_dead_worker_had_open_is_forgotten_when_it_starts_again(directory: Path) -> None:
    limits = KeyLimits(max_open=1)
    clock, first, second = two_workers(directory, limits)
    with ExitStack() as of_the_dead:
        of_the_dead.enter_context(first.open("a"))
        with pytest.raises(Overloaded), second.open("a"):
            pass
        SharedKeyUse(limits, clock, directory, 0)
        with second.open("a"):
            pass
        of_the_dead.pop_all()


def test_more_keys_than_slots_are_counted_and_open_ones_are_never_forgotten(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.workers.shared_key_use.NUM_SLOTS", NUM_PROBES)
    assert NUM_PROBES < NUM_SLOTS
    _, first, second = two_workers(directory, KeyLimits(max_open=1))
    with first.open("kept"):
        for number in range(5 * NUM_PROBES):
            with second.open(str(number)):
                pass
        with pytest.raises(Overloaded), second.open("kept"):
            pass


def registry(num_requests: int, num_ready: int) -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("requests", "Requests", ("status",), registry=made).labels("200").inc(num_requests)
    Gauge("tandem_proxy_ready_engines", "Ready", registry=made).set(num_ready)
    return made


def test_counts_of_workers_are_summed_and_what_all_see_is_not() -> None:
    merged = CollectorRegistry()
    merged.register(MergedMetrics(encode_samples(registry(*values)) for values in ((3, 2), (4, 1))))
    assert merged.get_sample_value("requests_total", {"status": "200"}) == 7.0
    assert merged.get_sample_value("tandem_proxy_ready_engines") == 2.0


async def test_workers_ask_all_others_and_leave_out_who_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.workers.peers.ASK_TIMEOUT_S", 30.0)
    peers = [Peers(tmp_path, number) for number in range(3)]
    for number, peer in enumerate(peers[:2]):
        await peer.serve(lambda line, number=number: f"{number} {line}".encode())  # type: ignore[misc]
    (tmp_path / "worker-7.sock").touch()
    assert await peers[2].ask("x y") == [b"0 x y", b"1 x y"]
    assert await peers[0].ask("x") == [b"1 x"]
    assert await Peers(None, 0).ask("x") == []
    for peer in peers:
        await peer.close()


def workers_of(proxy: RunningProxy) -> list[psutil.Process]:
    return psutil.Process(proxy.process.pid).children()


async def num_counted(proxy: RunningProxy) -> float:
    """Workers whose counts are in /metrics."""
    return samples(await metrics(proxy), "tandem_proxy_workers ")


async def metrics(proxy: RunningProxy) -> str:
    return (await proxy.client.get("/metrics")).text


def samples(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.system
async def test_a_worker_that_is_killed_is_replaced_and_sigterm_drains_all() -> None:
    async with proxy_process("--workers", "2") as proxy:

        async def both() -> bool:
            return await num_counted(proxy) == 2.0

        await until(both, within_s=30)
        proxy.finish.set()
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        for _ in range(4):
            assert (await proxy.client.post("/v1/completions", json=body)).status_code == 200
        text = await metrics(proxy)
        assert samples(text, 'tandem_proxy_requests_total{endpoint="/v1/completions",status="200"}') == 4.0

        killed = workers_of(proxy)[0]
        killed.kill()
        await until(lambda: len(workers_of(proxy)) == 2 and killed not in workers_of(proxy), within_s=30)
        await until(both, within_s=30)

        proxy.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await proxy.process.wait() == 0


@pytest.mark.system
async def test_workers_that_cannot_start_end_the_proxy() -> None:
    flags = ("--port", "0", "--workers", "2", "--model", "/nowhere")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "proxy", *flags)
    async with asyncio.timeout(60):
        assert await process.wait() == 1
