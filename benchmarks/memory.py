"""Peak memory of each process of a stack, and whether it grows over many requests.

Requests of every kind (greedy, sampled, penalties, several choices, logprobs, echo, a schema, streams that
are left) go through `tandem serve` with a small KV pool, which is soon full. Resident memory is read after
each tenth of them, and printed: `growth` is that of the last against the fourth, when all has been used once.
A run that ends early is begun anew; its lines say how far it had come.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.journal import Journal
from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve
from model_files import resolve_model

NUM_PARTS = 10
SETTLED = 3
"""The part from which on nothing should grow."""
WORDS = (
    "the",
    "of",
    "a",
    "model",
    "engine",
    "step",
    "block",
    "token",
    "cache",
    "light",
    "river",
    "blue",
    "proof",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
ROLES = ("proxy", "prompt_service", "completion_service", "engine.process", "launcher")


@dataclass(slots=True)
class Usage:
    """Resident bytes of one process, after each part of the requests."""

    resident: list[int] = field(default_factory=list)
    peak: int = 0


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kv-bytes", type=int, default=64 << 20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report, model_id = Report("memory"), resolve_model(arguments.model).name
    with tandem_serve("--model", arguments.model, "--kv-bytes", str(arguments.kv_bytes)) as url:
        usages = asyncio.run(measure(url, model_id, arguments.requests, arguments.streams, arguments.seed))
    for name, usage in usages.items():
        add_rows(report, name, usage)
    report.finish(arguments.json)


def add_rows(report: Report, name: str, usage: Usage) -> None:
    report.add(name, "peak", usage.peak / 2**20, "MiB")
    for part, resident in enumerate(usage.resident):
        report.add(name, f"after {part + 1}/{NUM_PARTS} of the requests", resident / 2**20, "MiB")
    settled = usage.resident[SETTLED]
    report.add(name, "growth", (usage.resident[-1] - settled) / 2**20, "MiB", settled / 2**20)


async def measure(url: str, model: str, num_requests: int, num_streams: int, seed: int) -> dict[str, Usage]:
    usages: dict[str, Usage] = {}
    journal = Journal()
    bodies = request_bodies(model, num_requests, random.Random(seed))
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        for part in range(NUM_PARTS):
            left = num_requests * (part + 1) // NUM_PARTS - num_requests * part // NUM_PARTS
            waiting = [next(bodies) for _ in range(left)]
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_streams):
                    tasks.create_task(send_all(client, waiting))
            for name, pid in processes().items():
                status = memory_of(pid)
                usage = usages.setdefault(name, Usage())
                usage.resident.append(status["VmRSS"])
                usage.peak = status["VmHWM"]
            resident = {name: round(usage.resident[-1] / 2**20, 1) for name, usage in usages.items()}
            journal.add(requests=(part + 1) * num_requests // NUM_PARTS, resident_mib=resident)
    return usages


async def send_all(client: httpx.AsyncClient, waiting: list[dict[str, Any]]) -> None:
    while waiting:
        body = dict(waiting.pop())
        if body.pop("leaves"):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    break
            continue
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()


def request_bodies(model: str, num_requests: int, random_: random.Random) -> Iterator[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"n": 3, "max_tokens": 3},
        {"logprobs": 5},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"guided_json": SCHEMA, "max_tokens": 12},
        {"min_p": 0.1, "logit_bias": {"5": 1.0}, "min_tokens": 2},
        {"stream": True},
        {"stream": True, "leaves": True, "max_tokens": 64},
    ]
    for index in range(num_requests):
        prompt = " ".join(random_.choices(WORDS, k=random_.randint(6, 40)))
        yield {
            "leaves": False,
            "model": model,
            "prompt": prompt,
            "max_tokens": 5,
            **kinds[index % len(kinds)],
        }


def processes() -> dict[str, int]:
    """Descendants of this process by what they are; an engine is named after its service."""
    parents = {pid: int(stat_of(pid)[1]) for pid in pids()}
    names = {pid: role_of(pid) for pid in parents if is_descendant(pid, parents)}
    found: dict[str, int] = {}
    for pid, name in names.items():
        if name is None:
            continue
        parent = names.get(parents[pid])
        found[f"{parent}: engine" if name == "engine.process" and parent else name] = pid
    return found


def pids() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (path / "stat").exists():
            yield int(path.name)


def stat_of(pid: int) -> list[str]:
    """State, parent and what follows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def is_descendant(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def role_of(pid: int) -> str | None:
    """The module that the process runs."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return None
    modules = [arguments[place + 1] for place, word in enumerate(arguments[:-1]) if word == "-m"]
    return next((role for role in ROLES if modules and modules[0].startswith(role)), None)


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by the names of /proc/PID/status."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


if __name__ == "__main__":
    main()
