"""What the prompt and the completion service have in common as flags and environment variables."""

import os
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.config import DeviceName, EngineConfig, KernelChoice, WaitingPolicyName
from kv_transfer.sockets import WILDCARD_HOSTS
from settings.loading import ProcessSettings
from wire.services import EngineRole

Transport = Literal["auto", "nixl", "zmq"]
NixlBackend = Literal["UCX", "LIBFABRIC"]
Dtype = Literal["fp16w", "fp32", "q4", "bf16"]


SHARED_WITH_ENGINE = (
    "model",
    "dtype",
    "device",
    "kernels",
    "num_threads",
    "tp",
    "block_size",
    "kv_bytes",
    "state_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefix_cache",
    "overlap",
    "stop_preempted_request",
    "waiting_policy",
    "waiting_age_limit",
    "max_chunk_tokens",
    "transport",
    "nixl_backend",
    "require_rdma",
    "verify_kv",
    "lease_s",
    "pull_back",
    "control_advertise_host",
    "control_allow",
    "log_level",
    "peak_gflops",
)
"""Fields that an engine's configuration takes over as they are."""


class EngineServiceSettings(ProcessSettings):
    """Settings of a service that owns an engine."""

    host: str = Field("127.0.0.1", description="address the HTTP server binds")
    port: int = Field(7001, ge=0, le=65535, description="port of the HTTP server; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    grace_s: float = Field(30.0, ge=0, description="how long running requests may go on after SIGTERM")
    zone: str | None = Field(None, description="where this is; proxies pair engines of one zone first")
    service_token: SecretStr | None = Field(
        None, description="what callers must show, comma-separated if there are several; better as a variable"
    )
    service_token_file: Path | None = Field(
        None, description="file with a service token a line, each good, read again when it changes"
    )
    max_body_bytes: int = Field(16 << 20, gt=0, description="larger request bodies are refused with 413")

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
    num_threads: int = Field(
        max(1, (os.cpu_count() or 2) // 2), ge=1, description="threads of the engine's matrix products"
    )

    tp: int = Field(1, ge=1, description="processes that share out the model and compute every step together")

    block_size: int = Field(32, ge=1, le=1024, description="tokens in a KV block")
    kv_bytes: int = Field(1 << 30, gt=0, description="memory of the KV pool")
    state_bytes: int | None = Field(
        None,
        gt=0,
        description="memory for per-sequence states of models that keep some; default: two slots for each of "
        "max_num_seqs, at most kv_bytes",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt + completion in tokens; default: the model's own limit"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences in a step at most")
    max_num_batched_tokens: int = Field(512, ge=1, description="prompt tokens in a step at most (the chunk)")
    prefix_cache: bool = Field(True, description="reuse the KV blocks of prompts that begin alike")
    overlap: bool = Field(False, description="schedule the next step while the model runs")
    stop_preempted_request: bool = Field(
        True, description="end a request that loses its KV blocks; off: compute it again later"
    )
    waiting_policy: WaitingPolicyName = Field(
        "fcfs",
        description="which waiting request is prefilled first: the first to come, the longest cached prefix,"
        " depth first through cached prefixes, the largest max_tokens, by lot, routing key or priority",
    )
    waiting_age_limit: int = Field(
        64, ge=1, description="prompt steps in which a request may be passed over before it goes first"
    )
    max_chunk_tokens: int | None = Field(
        None, ge=1, description="tokens of one prompt in a step at most; default: all that fit"
    )
    peak_gflops: float | None = Field(
        None, gt=0, description="what the log calls full use of the machine; default: measured at start"
    )

    transport: Transport = Field(
        "auto", description="auto takes NIXL on one host or over RDMA, else ZMQ, for each peer"
    )
    nixl_backend: NixlBackend = Field("UCX", description="NIXL's plugin; UCX_* variables are passed on to it")
    require_rdma: bool = Field(
        False, description="start, and read from a peer, only over RDMA; off: fall back to what there is"
    )
    verify_kv: bool = Field(
        False, description="prompt: send a digest of every block; completion: check what arrived against them"
    )
    lease_s: float = Field(10.0, gt=0, description="how long KV blocks stay pinned for a silent reader")

    pull_back: bool = Field(
        True, description="completion engines lend cached blocks to prompt engines, which fetch them"
    )
    control_host: str = Field(
        "127.0.0.1", description="address the hand-over protocol binds; the other engines connect to it"
    )
    control_port: int = Field(0, ge=0, le=65535, description="0 takes a free port at every engine start")
    control_advertise_host: str | None = Field(
        None, description="address told to other engines; default: --control-host"
    )

    control_allow: str | None = Field(
        None,
        description="networks that may connect to it, comma-separated, such as 10.0.0.0/8; default: all",
    )

    @field_validator("control_allow")
    @classmethod
    def _check_networks(cls, value: str | None) -> str | None:
        for text in (value or "").split(",") if value else ():
            ip_network(text.strip(), strict=False)
        return value

    @property
    def hands_over(self) -> bool:
        """Other engines read from this one, or it reads from them."""
        return True

    @model_validator(mode="after")
    def _check_that_others_can_connect(self) -> Self:
        told = self.control_host
        if told in WILDCARD_HOSTS and self.control_advertise_host is not None:
            told = self.control_advertise_host
        if self.hands_over and _is_loopback(told) and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} serves other machines, whose engines cannot connect to {told}:"
                " give --control-host an address of this one (or 0.0.0.0, and --control-advertise-host)"
            )
        return self

    def engine_config(
        self, role: EngineRole, engine_id: str, epoch: int, commands: str, events: str
    ) -> EngineConfig:
        """The configuration of one engine process; `commands` and `events` are its ipc endpoints."""
        return EngineConfig(
            role=role,
            engine_id=engine_id,
            epoch=epoch,
            control_bind=f"tcp://{self.control_host}:{self.control_port}",
            command_endpoint=commands,
            event_endpoint=events,
            **{name: getattr(self, name) for name in SHARED_WITH_ENGINE},
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
