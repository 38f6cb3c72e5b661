"""What fetching an earlier turn's answer saves: `python -m benchmarks.pull_back [--json FILE]`.

Two whole stacks, one with `--no-pull-back`, hold the same chats of two turns, one after the other. The second
prompt is the first one, its answer and a short question; only the completion engine has the answer's blocks.
"""

import asyncio
import json
import random
import time
from statistics import median

import httpx

from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve

ANSWER_TOKENS = (64, 128, 256)
QUESTION_TOKENS = 16


async def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of the first turn")
    parser.add_argument("--repeats", type=int, default=5, help="chats for each row")
    arguments = parser.parse_args()
    shared = ("--model", arguments.model, "--num-threads", "1")
    report = Report("pull_back")
    with tandem_serve(*shared) as fetching, tandem_serve(*shared, "--no-pull-back") as computing:
        for num_answer_tokens in ANSWER_TOKENS:
            times: dict[str, list[float]] = {fetching: [], computing: []}
            for repeat in range(arguments.repeats + 1):
                for url, measured in times.items():
                    chance = random.Random(num_answer_tokens * 1000 + repeat)
                    prompt = [chance.randrange(100, 40_000) for _ in range(arguments.prompt_tokens)]
                    seconds = await second_turn_s(url, arguments.model, prompt, num_answer_tokens)
                    if repeat:  # the first one connects the engines
                        measured.append(seconds)
            case = f"answer of {num_answer_tokens} tokens"
            report.add(case, "TTFT of the next turn", median(times[fetching]), "s", median(times[computing]))
    report.finish(arguments.json)


async def second_turn_s(url: str, model: str, prompt: list[int], num_answer_tokens: int) -> float:
    """Seconds to the first token of the second turn."""
    async with httpx.AsyncClient(timeout=300.0) as client:
        text = await answer(client, url, model, prompt, num_answer_tokens)
        tokens = await client.post(url + "/tokenize", json={"model": model, "prompt": text})
        tokens.raise_for_status()
        question = [100 + number for number in range(QUESTION_TOKENS)]
        return await first_token_s(client, url, model, [*prompt, *tokens.json()["tokens"], *question])


async def answer(client: httpx.AsyncClient, url: str, model: str, prompt: list[int], max_tokens: int) -> str:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post(url + "/v1/completions", json=body)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


async def first_token_s(client: httpx.AsyncClient, url: str, model: str, prompt: list[int]) -> float:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    started_s = time.perf_counter()
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if "error" in json.loads(line[6:]):
                    raise RuntimeError(line)
                return time.perf_counter() - started_s
    raise RuntimeError("the stream ended without a token")


if __name__ == "__main__":
    asyncio.run(main())
