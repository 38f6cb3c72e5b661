"""What moving a prompt while it is computed saves on a slow link.

`python -m benchmarks.overlap [--json FILE]`. Two whole stacks, one with `--no-chunk-handover`, take the same
prompts in turn in a network namespace of their own whose loopback is limited with tc; it needs `unshare`,
`ip`, `tc` and the right to make a namespace. The time from the prompt engine's last chunk to the completion
engine's first own token is what a client sees between the first token and the second.
"""

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
from statistics import median

import httpx

from benchmarks.pair import Timings, one_request
from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve

CHUNKS = (4, 8)
NUM_FIRST_TOKENS = 64
BURST_BYTES = 256 << 10
"""Of the token bucket: more than one packet on the loopback."""


def main() -> None:
    parser = argument_parser("Moving a prompt while it is computed, on a link that is limited with tc")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--transport", choices=("zmq", "nixl"), default="zmq")
    parser.add_argument("--rate-mbit", type=int, default=400, help="of the link")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2, help="prompts for each row")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.in_namespace:
        enter_namespace()
    limit_loopback(arguments.rate_mbit)
    asyncio.run(compare(arguments))


def enter_namespace() -> None:
    """Become this benchmark in a network namespace of its own."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"benchmarks.overlap needs {', '.join(missing)} (util-linux, iproute2)")
    command = [sys.executable, "-m", "benchmarks.overlap", "--in-namespace", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--map-root-user", "--net", *command])


def limit_loopback(rate_mbit: int) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    bucket = ["rate", f"{rate_mbit}mbit", "burst", str(BURST_BYTES), "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket], check=True)


async def compare(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("UCX_TLS", "tcp")  # a copy from process to process would not use the link
    shared = (
        *("--model", arguments.model, "--transport", arguments.transport, "--num-threads", "1"),
        *("--max-num-batched-tokens", str(arguments.chunk_tokens)),
    )
    report = Report("overlap")
    with tandem_serve(*shared) as by_chunks, tandem_serve(*shared, "--no-chunk-handover") as whole:
        for url in (by_chunks, whole):  # the first prompt connects the engines
            await ask(url, arguments.model, random_prompt(NUM_FIRST_TOKENS, seed=0), Timings())
        for num_chunks in CHUNKS:
            timings = {by_chunks: Timings(), whole: Timings()}
            for repeat in range(arguments.repeats):
                prompt = random_prompt(num_chunks * arguments.chunk_tokens, seed=repeat)
                for url, measured in timings.items():
                    await ask(url, arguments.model, prompt, measured)
                print(f"{num_chunks} chunks, prompt {repeat + 1} of {arguments.repeats}", file=sys.stderr)
            case = f"{num_chunks} chunks of {arguments.chunk_tokens} tokens, {arguments.rate_mbit} Mbit/s"
            add_rows(report, case, timings[by_chunks], timings[whole])
    report.finish(arguments.json)


async def ask(url: str, model: str, prompt: list[int], timings: Timings) -> None:
    """Two tokens: the prompt engine's and the completion engine's first."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(timeout=300.0) as client:
        await one_request(client, url + "/v1/completions", body, timings)


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(num_tokens * 1000 + seed)
    return [chance.randrange(100, 40_000) for _ in range(num_tokens)]


def add_rows(report: Report, case: str, by_chunks: Timings, whole: Timings) -> None:
    """The baseline moves a prompt when it is whole."""
    report.add(case, "last chunk to first own token", median(by_chunks.gap_s), "s", median(whole.gap_s))
    report.add(case, "TTFT", median(by_chunks.first_token_s), "s", median(whole.first_token_s))


if __name__ == "__main__":
    main()
