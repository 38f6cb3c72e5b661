"""`tandem serve --engine normal --dp 2`: two engines that step alike, each behind its own service."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import httpx
import pytest

from launcher.stack import StackSettings, stack_specs
from model_files.resolve import resolve_model
from tests.engine.reference import reference_generate
from tests.ports import free_port, free_ports
from tests.system.processes import RunningStack, ServiceProcess, eventually

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 12
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little girl",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are red, blue and",
    "My name is",
    "1, 2, 3, 4,",
    "The quick brown fox",
)
RANKS = ("normal-0", "normal-1")
LOSS_LIMIT_S = {signal.SIGKILL: 10.0, signal.SIGSTOP: 30.0}
"""A stopped engine is ended after 7 s of silence; without that its group would wait for 300 s."""


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(
        dtype="fp32",
        engine="normal",
        dp=2,
        max_num_batched_tokens=64,
        prefill_attempt_interval=4,
        prefill_any_attempt_interval=6,
    ) as stack:
        yield stack


@cache
def expected(prompt: str) -> str:
    """What one engine answers: the greedy continuation of the same weights."""
    files = resolve_model(MODEL)
    ids = list(files.tokenizer().encode(prompt).ids)
    return str(files.tokenizer().decode(reference_generate(files, ids, NUM_TOKENS), skip_special_tokens=True))


def complete(stack: RunningStack, prompt: str) -> str:
    with stack.client() as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
    return answer.choices[0].text


def metric(service: ServiceProcess, name: str) -> float:
    for line in httpx.get(service.url + "/metrics", timeout=5.0).text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"{service.spec.name} exports no {name}")


def test_answers_equal_one_engines_and_both_ranks_serve(stack: RunningStack) -> None:
    before = [metric(stack.services[rank], "tandem_engine_output_tokens_total") for rank in RANKS]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda prompt: complete(stack, prompt), PROMPTS))
    assert texts == [expected(prompt) for prompt in PROMPTS]
    after = [metric(stack.services[rank], "tandem_engine_output_tokens_total") for rank in RANKS]
    numbers = [now - then for now, then in zip(after, before, strict=True)]
    assert min(numbers) >= NUM_TOKENS  # how many each gets depends on how soon the others end
    assert sum(numbers) == len(PROMPTS) * NUM_TOKENS


def test_a_rank_without_requests_runs_placeholders(stack: RunningStack) -> None:
    before = [metric(stack.services[rank], "tandem_engine_placeholder_steps_total") for rank in RANKS]
    complete(stack, PROMPTS[0])
    complete(stack, PROMPTS[0])  # the proxy takes the ranks in turn

    def both_did() -> bool:
        after = [metric(stack.services[rank], "tandem_engine_placeholder_steps_total") for rank in RANKS]
        return all(now - then >= NUM_TOKENS - 1 for now, then in zip(after, before, strict=True))

    eventually(both_did, "each rank has run a placeholder for each of the other's decode steps")


def test_idle_ranks_do_not_spin(stack: RunningStack) -> None:
    def cpu_s() -> list[float]:
        times = [stack.services[rank].engine_process().cpu_times() for rank in RANKS]
        return [t.user + t.system for t in times]

    complete(stack, PROMPTS[0])
    before, started_s = cpu_s(), time.monotonic()
    eventually(lambda: time.monotonic() - started_s > 3.0, "three seconds have passed")
    shares = [
        (now - then) / (time.monotonic() - started_s) for now, then in zip(cpu_s(), before, strict=True)
    ]
    assert max(shares) < 0.1, shares


class OpenStream:
    """A completion that one rank streams until something ends it."""

    def __init__(self, service: ServiceProcess, pool: ThreadPoolExecutor) -> None:
        self.has_begun = threading.Event()
        self._ended = pool.submit(self._read, service.url)

    def _read(self, url: str) -> tuple[str, float]:
        body = {
            "request_id": f"open-{time.monotonic_ns()}",
            "prompt_token_ids": [504, 3575, 282, 4649, 314],
            "sampling": {"max_tokens": 4000, "temperature": 0.0, "ignore_eos": True},
        }
        last = ""
        with httpx.stream("POST", url + "/v1/completion", json=body, timeout=60.0) as answer:
            for line in answer.iter_lines():
                self.has_begun.set()
                last = line or last
        return last, time.monotonic()

    def end(self) -> tuple[str, float]:
        """The last event and when the stream ended."""
        return self._ended.result(60)


@pytest.mark.parametrize(("number", "lost"), [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGSTOP, 0)])
def test_a_lost_engine_ends_both_ranks_requests_and_the_group_forms_again(
    stack: RunningStack, number: signal.Signals, lost: int
) -> None:
    services = [stack.services[rank] for rank in RANKS]
    epochs = [service.info()["epoch"] for service in services]
    with ThreadPoolExecutor(2) as pool:
        streams = [OpenStream(service, pool) for service in services]
        assert all(stream.has_begun.wait(60) for stream in streams)
        lost_s = time.monotonic()
        os.kill(services[lost].engine_process().pid, number)
        ends = [stream.end() for stream in streams]
    for last_event, ended_s in ends:
        assert '"error":{' in last_event
        assert "the engine process ended with code" in last_event
        assert ended_s - lost_s < LOSS_LIMIT_S[number]
    assert f"the group of rank {1 - lost} has ended" in ends[1 - lost][0]
    for service, epoch in zip(services, epochs, strict=True):
        eventually(service.is_ready, f"{service.spec.name} is ready again", 60)
        assert service.info()["epoch"] != epoch
    eventually(stack.services["proxy"].is_ready, "the proxy has an engine again")
    assert [complete(stack, prompt) for prompt in PROMPTS[:2]] == [expected(p) for p in PROMPTS[:2]]


def test_ranks_with_different_settings_refuse_to_start(tmp_path: Path) -> None:
    settings = StackSettings.model_validate(
        {"port": free_port(), "engine": "normal", "dp": 2, "num_threads": 1, "dtype": "fp32"}
    )
    specs = stack_specs(settings, free_ports)[:2]
    specs[1] = type(specs[1])(
        specs[1].name,
        specs[1].module,
        (*specs[1].arguments, "--max-num-seqs", "4"),
        specs[1].url,
        specs[1].ready_path,
    )
    services = [ServiceProcess(spec, tmp_path / f"{spec.name}.log") for spec in specs]
    try:
        assert [service.process.wait(timeout=120) for service in services] == [1, 1]
        for service in services:
            assert "--max-num-seqs: 64 on rank 0, 4 on rank 1" in service.log_tail()
            assert "Traceback" not in service.log_tail()
    finally:
        for service in services:
            service.stop()
