"""The one-machine stack: which processes it has, their order, their common fate.

1. start     every process at once; ports are chosen here
2. loading   one progress line per process until each says it is ready
3. serving   until Ctrl-C, SIGTERM or the first process that ends
4. stopping  the proxy first, so that nothing new arrives, then the engines
"""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from typing import Literal, Self

import httpx
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.config import DeviceName, KernelChoice, SpeculativeMethod, WaitingPolicyName
from engine.serving.settings import Dtype, Transport
from launcher.child import Child, ChildSpec, first_to_end
from launcher.ports import free_ports
from model_files.resolve import resolve_model
from settings.loading import ProcessSettings

POLL_INTERVAL_S = 0.1
STOP_GRACE_S = 35.0
"""A little longer than the processes' own grace for running requests."""


class StackSettings(ProcessSettings):
    """tandem serve: prompt engines, completion engines and the proxy on this machine."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_SERVE_")

    host: str = Field("127.0.0.1", description="address the proxy binds")
    port: int = Field(8000, ge=1, le=65535, description="port of the proxy")
    workers: int = Field(1, ge=1, le=64, description="processes of the proxy; they share its port")
    engine: Literal["pair", "normal"] = Field(
        "pair", description="pair: a prompt and a completion engine; normal: one engine that does both"
    )
    prompt_engines: int = Field(1, ge=1, description="prompt engines, each in a service of its own")
    completion_engines: int = Field(1, ge=1, description="completion engines, each in a service of its own")
    dp: int = Field(
        1, ge=1, description="engines that step alike, each in a service of its own (--engine normal)"
    )
    tp: int = Field(1, ge=1, description="processes that share out the model of each engine")
    prefill_attempt_interval: int | None = Field(
        None, ge=1, description="decode steps between prompt steps that every engine wants (--engine normal)"
    )
    prefill_any_attempt_interval: int | None = Field(
        None, ge=1, description="decode steps between prompt steps that any engine wants (--engine normal)"
    )
    model: str = Field(
        "smollm2-135m-instruct",
        description="the embedded model's name, a directory in Hugging Face layout, or a GGUF file",
    )
    dtype: Dtype = Field(
        "fp16w",
        description="fp16w: half-precision weights; fp32: exact; q4: exact weights of a 4-bit checkpoint; "
        "bf16: what GPUs compute in",
    )
    device: DeviceName = Field(
        "auto", description="cuda needs --dtype bf16; auto takes a GPU for bf16 where there is one"
    )
    kernels: KernelChoice = Field(
        "auto",
        description="native: compiled at install; torch; auto: native where it is built and can be used",
    )
    transport: Transport = Field("auto", description="auto takes NIXL where both engines have it, else ZMQ")
    verify_kv: bool = Field(False, description="check a digest of every block that is handed over")
    kv_bytes: int | None = Field(None, gt=0, description="memory of each engine's KV pool")
    state_bytes: int | None = Field(
        None, gt=0, description="memory of each engine's per-sequence states, for models that keep some"
    )
    max_model_len: int | None = Field(None, ge=2, description="longest prompt + completion in tokens")
    max_num_seqs: int | None = Field(None, ge=1, description="sequences in a step at most")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="prompt tokens in a step at most")
    block_size: int | None = Field(None, ge=1, description="tokens in a KV block")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="threads of each engine; default: the usable cores shared out among the engines",
    )
    prefix_cache: bool = Field(True, description="reuse the KV blocks of prompts that begin alike")
    overlap: bool = Field(False, description="schedule the next step while the model runs")
    speculative: SpeculativeMethod = Field(
        "off",
        description="ngram: guess that the text goes on as it did before, verify several tokens a step;"
        " model: guess with --draft-model",
    )
    draft_model: str | None = Field(None, description="a smaller model with the same tokenizer")
    draft_kv_bytes: int | None = Field(
        None, ge=1 << 20, description="memory for keys and values of the draft model"
    )
    num_draft_tokens: int | None = Field(
        None, ge=1, le=16, description="tokens guessed for a sequence in a step at most"
    )
    stop_preempted_request: bool = Field(
        True,
        description="end a request that loses its KV blocks; off: compute it again later (--engine normal)",
    )
    chunk_handover: bool = Field(
        True, description="move a prompt while it is computed; off: when it is whole (--engine pair)"
    )
    waiting_policy: WaitingPolicyName = Field(
        "fcfs", description="which waiting request is prefilled first (docs/decisions)"
    )
    admission_estimate: bool | None = Field(
        None,
        description="keep requests waiting while the KV pool has no room for the output expected of all;"
        " default: on, but off with --engine normal",
    )
    pull_back: bool = Field(
        True, description="prompt engines fetch cached answers from completion engines (--engine pair)"
    )
    waiting_age_limit: int | None = Field(
        None, ge=1, description="prompt steps in which a request may be passed over before it goes first"
    )
    max_chunk_tokens: int | None = Field(None, ge=1, description="tokens of one prompt in a step at most")
    retract_cheapest: bool = Field(
        False, description="when KV blocks run out, the fewest outputs give way, not the longest"
    )
    prompt_args: str = Field(
        "", description="more flags for prompt engines, in quotes; see python -m prompt_service --help"
    )
    completion_args: str = Field(
        "",
        description="more flags for completion or NORMAL engines; see python -m completion_service --help",
    )
    proxy_args: str = Field("", description="more flags for the proxy; see python -m proxy --help")
    verbose: bool = Field(False, description="show everything the processes log")

    @model_validator(mode="after")
    def _check_engine_kind(self) -> Self:
        for name in ("prefill_attempt_interval", "prefill_any_attempt_interval"):
            if self.engine == "pair" and getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --engine normal; a pair does not choose")
        if self.engine == "pair" and self.dp > 1:
            raise ValueError(f"--dp {self.dp} needs --engine normal; the engines of a pair do not step alike")
        for name in ("prompt_args", "completion_args", "proxy_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from None
        if self.engine == "normal" and self.prompt_args:
            raise ValueError("--prompt-args needs --engine pair; NORMAL engines take --completion-args")
        for name in ("prompt_engines", "completion_engines"):
            if self.engine == "normal" and getattr(self, name) > 1:
                raise ValueError(f"--{name.replace('_', '-')} needs --engine pair; see --dp")
        return self


SHARED_WITH_SERVICES = (
    "model",
    "dtype",
    "device",
    "kernels",
    "transport",
    "verify_kv",
    "kv_bytes",
    "state_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_threads",
    "tp",
    "prefix_cache",
    "overlap",
    "stop_preempted_request",
    "pull_back",
)
PREFILL_OPTIONS = ("waiting_policy", "waiting_age_limit", "max_chunk_tokens")
DECODE_OPTIONS = (
    "speculative",
    "draft_model",
    "draft_kv_bytes",
    "num_draft_tokens",
    "admission_estimate",
    "retract_cheapest",
)


async def serve(settings: StackSettings) -> int:
    """Run the stack until it is told to stop; returns the exit code. `ModelFilesError` for a bad model."""
    console = Console(stderr=True)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopping.set)
    stack = Stack(settings, console)
    try:
        await stack.start()
        ending = asyncio.create_task(stack.first_to_end())
        loading = asyncio.create_task(stack.wait_until_ready())
        told = asyncio.create_task(stopping.wait())
        await asyncio.wait((ending, loading, told), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not ending.done() and not told.done():
            stack.print_how_to_use()
            await asyncio.wait((ending, told), return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        if told.done():
            console.print("stopping")
            return 0
        child, exit_code = ending.result()
        console.print(f"[bold red]{child.spec.name} ended with code {exit_code}:[/] ", end="")
        console.print(child.why(), markup=False)
        return 1
    finally:
        await stack.stop()


class Stack:
    """The processes of one machine's stack."""

    def __init__(self, settings: StackSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._model_id = resolve_model(settings.model).name
        self._children: list[Child] = []

    async def start(self) -> None:
        for spec in stack_specs(self._settings):
            self._children.append(await Child.start(spec, self._on_line))

    async def first_to_end(self) -> tuple[Child, int]:
        return await first_to_end(self._children)

    async def wait_until_ready(self) -> None:
        """Show each process's progress until all are ready."""
        columns = (
            TextColumn("{task.fields[name]:<11}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(timeout=2.0) as client:
                pending = [
                    tasks.create_task(
                        _follow_progress(
                            client,
                            child.spec,
                            progress,
                            progress.add_task("starting", total=1.0, name=child.spec.name),
                        )
                    )
                    for child in self._children
                ]
                await asyncio.gather(*pending)

    def print_how_to_use(self) -> None:
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "::") else self._settings.host
        url = f"http://{host}:{self._settings.port}"
        body = {
            "model": self._model_id,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "stream": True,
        }
        self._console.print(f"\n[bold green]ready[/] at {url}; try:\n")
        curl = (
            f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
        )
        print(curl + "\n", flush=True)

    async def stop(self) -> None:
        """End every process, the proxy first; none is left behind."""
        # Engines of a group end together: one that goes alone is an error to the others.
        for children in (self._children[-1:], self._children[:-1]):
            await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in children))

    def _on_line(self, name: str, line: str) -> None:
        if self._settings.verbose or " WARNING " in line or " ERROR " in line:
            self._console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)


def stack_specs(
    settings: StackSettings, draw_ports: Callable[[int], Sequence[int]] = free_ports
) -> list[ChildSpec]:
    """What to start, engines first; `draw_ports` gives so many ports of this machine."""
    group_port, *ports = draw_ports(1 + _num_engines(settings))
    num_threads = settings.num_threads or threads_of_each(settings, len(os.sched_getaffinity(0)))
    shared: list[str] = []
    for name in SHARED_WITH_SERVICES:
        shared += _flag(name, num_threads if name == "num_threads" else getattr(settings, name))
    engines: list[ChildSpec] = []
    if settings.engine == "pair":
        arguments = {
            "prompt": [
                *shared,
                *_flags(settings, "chunk_handover", *PREFILL_OPTIONS),
                *shlex.split(settings.prompt_args),
            ],
            "completion": [
                *shared,
                *_flags(settings, *DECODE_OPTIONS),
                *shlex.split(settings.completion_args),
            ],
        }
        names = [("prompt", name) for name in _names("prompt", settings.prompt_engines)]
        names += [("completion", name) for name in _names("completion", settings.completion_engines)]
        engines += [
            _service(name, f"{role}_service", port, arguments[role])
            for (role, name), port in zip(names, ports, strict=True)
        ]
    else:
        engines += _normal_services(settings, shared, ports, group_port)
    proxy_arguments = ["--host", settings.host, "--port", str(settings.port), "--model", settings.model]
    proxy_arguments += ["--workers", str(settings.workers)]
    for engine in engines:
        role = engine.name.partition("-")[0]
        proxy_arguments += [f"--{role}-url", engine.url]
    proxy_arguments += shlex.split(settings.proxy_args)
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    proxy_url = f"http://{host}:{settings.port}"
    return [*engines, ChildSpec("proxy", "proxy", tuple(proxy_arguments), proxy_url, "/health")]


def threads_of_each(settings: StackSettings, num_cores: int) -> int:
    """No more threads than cores in all: engines whose threads take turns on a core wait for each other."""
    return max(1, num_cores // _num_engines(settings))


def _num_engines(settings: StackSettings) -> int:
    return (
        settings.dp if settings.engine == "normal" else settings.prompt_engines + settings.completion_engines
    )


def _names(role: str, count: int) -> list[str]:
    return [role] if count == 1 else [f"{role}-{number}" for number in range(count)]


def _normal_services(
    settings: StackSettings, shared: list[str], ports: Sequence[int], group_port: int
) -> list[ChildSpec]:
    """One service, or one for each rank of a group."""
    arguments = [*shared, "--engine", "normal", *_flags(settings, *PREFILL_OPTIONS, *DECODE_OPTIONS)]
    for name in ("prefill_attempt_interval", "prefill_any_attempt_interval"):
        arguments += _flag(name, getattr(settings, name))
    arguments += shlex.split(settings.completion_args)
    if settings.dp == 1:
        return [_service("normal", "completion_service", ports[0], arguments)]
    arguments += ["--dp-size", str(settings.dp), "--dp-address", f"127.0.0.1:{group_port}"]
    return [
        _service(f"normal-{rank}", "completion_service", port, [*arguments, "--dp-rank", str(rank)])
        for rank, port in enumerate(ports)
    ]


def _flags(settings: StackSettings, *names: str) -> list[str]:
    return [argument for name in names for argument in _flag(name, getattr(settings, name))]


def _flag(name: str, value: str | int | bool | None) -> list[str]:
    """The arguments that set an option; none for None."""
    option = name.replace("_", "-")
    match value:
        case None:
            return []
        case bool():
            return [f"--{option}" if value else f"--no-{option}"]
        case _:
            return [f"--{option}", str(value)]


def _service(name: str, module: str, port: int, arguments: list[str]) -> ChildSpec:
    url = f"http://127.0.0.1:{port}"
    return ChildSpec(name, module, ("--port", str(port), *arguments), url, "/health/ready")


async def _follow_progress(
    client: httpx.AsyncClient, spec: ChildSpec, progress: Progress, task: TaskID
) -> None:
    """Copy what a process says of its start into its progress line, until it is ready."""
    while True:
        try:
            answer = await client.get(spec.url + spec.ready_path)
        except httpx.TransportError:
            pass  # its HTTP server is not up yet
        else:
            if answer.status_code == 200:
                progress.update(task, completed=1.0, description="ready")
                return
            state = answer.json()
            progress.update(
                task, completed=state.get("fraction", 0.0), description=state.get("stage", state["status"])
            )
        await asyncio.sleep(POLL_INTERVAL_S)
