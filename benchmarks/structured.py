"""Every schema of the JSON-Schema-Test-Suite through a pair: refused with 400, or answered validly.

The same requests with drafts off and on. An answer that reaches its token limit is no answer: such requests
are counted apart, the others must be valid.
"""

import asyncio
import gzip
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve

Schema = dict[str, Any] | bool

SUITE = Path(__file__).parent / "data" / "json_schema_test_suite.jsonl.gz"


@dataclass(slots=True)
class Outcomes:
    num_refused: int = 0
    num_cut: int = 0
    num_valid: int = 0
    num_invalid: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    refusal_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--first", type=int, default=0, help="where to begin, to measure in pieces")
    parser.add_argument("--schemas", type=int, default=None, help="only so many from there")
    parser.add_argument("--drafts", nargs="+", default=["off", "ngram"], choices=["off", "ngram"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=96)
    arguments = parser.parse_args()
    schemas = read_schemas()[arguments.first :][: arguments.schemas]
    report = Report("structured")
    for method in arguments.drafts:
        with tandem_serve("--model", arguments.model, "--speculative", method) as url:
            body = {"model": arguments.model, "max_tokens": arguments.output_tokens}
            outcomes = asyncio.run(ask_all(url, schemas, body, arguments.streams))
        add_rows(report, f"drafts {method}", outcomes, len(schemas))
    report.finish(arguments.json)


def add_rows(report: Report, case: str, outcomes: Outcomes, num_schemas: int) -> None:
    num_finished = outcomes.num_valid + outcomes.num_invalid
    report.add(case, "refused with 400", outcomes.num_refused, "schemas", num_schemas)
    if outcomes.refusal_s:
        report.add(case, "median time of a refusal", median(outcomes.refusal_s) * 1000, "ms")
        report.add(case, "longest time of a refusal", max(outcomes.refusal_s) * 1000, "ms")
    report.add(case, "reached max_tokens", outcomes.num_cut, "schemas", num_schemas)
    report.add(case, "valid answers", outcomes.num_valid, "answers", num_finished)
    report.add(case, "output tokens/s", outcomes.num_tokens / outcomes.seconds, "1/s")


def read_schemas() -> list[Schema]:
    with gzip.open(SUITE, "rt") as lines:
        return [json.loads(line)["schema"] for line in lines]


async def ask_all(url: str, schemas: list[Schema], body: dict[str, Any], num_streams: int) -> Outcomes:
    outcomes, waiting = Outcomes(), list(enumerate(schemas))
    started_s = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:

        async def stream() -> None:
            while waiting:
                seed, schema = waiting.pop(0)
                await ask(client, schema, {**body, "seed": seed}, outcomes)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_streams):
                tasks.create_task(stream())
    outcomes.seconds = time.perf_counter() - started_s
    return outcomes


async def ask(client: httpx.AsyncClient, schema: Schema, body: dict[str, Any], outcomes: Outcomes) -> None:
    started_s = time.perf_counter()
    text = f"Write short JSON that fits this schema:\n{json.dumps(schema)[:400]}"
    response = await client.post(
        "/v1/chat/completions",
        json={
            **body,
            "messages": [{"role": "user", "content": text}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "test", "schema": schema}},
        },
    )
    if response.status_code == 400:
        outcomes.refusal_s.append(time.perf_counter() - started_s)
        outcomes.num_refused += 1
        return
    response.raise_for_status()
    answer = response.json()
    outcomes.num_tokens += answer["usage"]["completion_tokens"]
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        outcomes.num_cut += 1
        print(f"cut: {json.dumps(schema)[:200]}: {choice['message']['content'][-120:]!r}")
    elif is_valid(schema, choice["message"]["content"]):
        outcomes.num_valid += 1
    else:
        outcomes.num_invalid += 1
        print(f"invalid: {json.dumps(schema)}: {choice['message']['content']}")


def is_valid(schema: Schema, text: str) -> bool:
    return jsonschema_rs.Draft202012Validator(schema).is_valid(json.loads(text))


if __name__ == "__main__":
    main()
