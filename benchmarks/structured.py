"""Every schema of the JSON-Schema-Test-Suite through a pair: refused with 400, or answered validly.

The same requests with drafts off and on. An answer that reaches its token limit is no answer: such requests
are counted apart, the others must be valid. `--journal FILE` makes it resumable, schema by schema.
"""

import asyncio
import gzip
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.journal import Journal, Line, add_journal_option
from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve
from model_files import resolve_model

Schema = dict[str, Any] | bool

SUITE = Path(__file__).parent / "data" / "json_schema_test_suite.jsonl.gz"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--first", type=int, default=0, help="where to begin, to measure in pieces")
    parser.add_argument("--schemas", type=int, default=None, help="only so many from there")
    parser.add_argument("--drafts", nargs="+", default=["off", "ngram"], choices=["off", "ngram"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=96)
    add_journal_option(parser)
    arguments = parser.parse_args()
    schemas = read_schemas()
    asked = range(len(schemas))[arguments.first :][: arguments.schemas]
    journal, report = Journal(arguments.journal), Report("structured")
    for method in arguments.drafts:
        done = {line["schema"] for line in journal.having(drafts=method)}
        waiting = [(index, schemas[index]) for index in asked if index not in done]
        if waiting:
            with tandem_serve("--model", arguments.model, "--speculative", method) as url:
                body = {"model": resolve_model(arguments.model).name, "max_tokens": arguments.output_tokens}
                asyncio.run(Asking(url, method, body, journal).ask_all(waiting, arguments.streams))
        add_rows(report, f"drafts {method}", journal.having(drafts=method))
    report.finish(arguments.json)


def add_rows(report: Report, case: str, lines: list[Line]) -> None:
    def number(*outcomes: str) -> int:
        return sum(line["outcome"] in outcomes for line in lines)

    refusal_s = [line["seconds"] for line in lines if line["outcome"] == "refused"]
    report.add(case, "refused with 400", len(refusal_s), "schemas", len(lines))
    if refusal_s:
        report.add(case, "median time of a refusal", median(refusal_s) * 1000, "ms")
        report.add(case, "longest time of a refusal", max(refusal_s) * 1000, "ms")
    report.add(case, "reached max_tokens", number("cut"), "schemas", len(lines))
    report.add(case, "valid answers", number("valid"), "answers", number("valid", "invalid"))
    report.add(case, "output tokens", sum(line["num_tokens"] for line in lines), "tokens")


def read_schemas() -> list[Schema]:
    with gzip.open(SUITE, "rt") as lines:
        return [json.loads(line)["schema"] for line in lines]


class Asking:
    def __init__(self, url: str, method: str, body: dict[str, Any], journal: Journal) -> None:
        self._url = url
        self._method = method
        self._body = body
        self._journal = journal

    async def ask_all(self, waiting: list[tuple[int, Schema]], num_streams: int) -> None:
        """A line for each schema."""
        async with httpx.AsyncClient(base_url=self._url, timeout=600.0) as client:

            async def stream() -> None:
                while waiting:
                    await self._ask(client, *waiting.pop(0))

            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_streams):
                    tasks.create_task(stream())

    async def _ask(self, client: httpx.AsyncClient, index: int, schema: Schema) -> None:
        started_s = time.perf_counter()
        text = f"Write short JSON that fits this schema:\n{json.dumps(schema)[:400]}"
        response = await client.post(
            "/v1/chat/completions",
            json={
                **self._body,
                "seed": index,
                "messages": [{"role": "user", "content": text}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "test", "schema": schema}},
            },
        )
        line: Line = {"drafts": self._method, "schema": index, "num_tokens": 0}
        line["seconds"] = round(time.perf_counter() - started_s, 4)
        if response.status_code == 400:
            self._journal.add(**line, outcome="refused")
            return
        response.raise_for_status()
        answer = response.json()
        line["num_tokens"] = answer["usage"]["completion_tokens"]
        choice = answer["choices"][0]
        content = choice["message"]["content"]
        if choice["finish_reason"] == "length":
            self._journal.add(**line, outcome="cut", end=content[-60:])
        elif is_valid(schema, content):
            self._journal.add(**line, outcome="valid")
        else:
            self._journal.add(**line, outcome="invalid", text=content)


def is_valid(schema: Schema, text: str) -> bool:
    return jsonschema_rs.Draft202012Validator(schema).is_valid(json.loads(text))


if __name__ == "__main__":
    main()
