"""What an engine process needs to know; the service builds it from its settings and hands it over as JSON."""

from dataclasses import dataclass

from engine.errors import EngineStartError
from wire.services import EngineRole


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine process. Sizes in tokens unless a name says bytes, blocks or seconds."""

    role: EngineRole
    engine_id: str
    epoch: int
    model: str
    dtype: str = "fp16w"
    num_threads: int = 1

    block_size: int = 32
    kv_bytes: int = 1 << 30
    max_model_len: int | None = None
    """None takes the model's own limit, or less where the KV pool is smaller than that."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    overlap: bool = False
    """Results are processed one step late, while the model runs."""
    stop_preempted_request: bool = True
    """False computes a preempted sequence again; a completion engine cannot."""

    transport: str = "auto"
    control_bind: str = "tcp://127.0.0.1:0"
    control_advertise_host: str | None = None
    lease_s: float = 10.0
    handover_wait_s: float = 60.0
    """How long a completion engine keeps a request that waits for its KV blocks or for room for them."""

    log_level: str = "info"
    peak_gflops: float | None = None
    """GFLOP/s that count as full use in the log; None measures a float32 matrix product."""

    command_endpoint: str
    event_endpoint: str
    """ZMQ ipc endpoints, bound by the service: commands flow to the engine, events flow back."""

    def check(self) -> None:
        """`EngineStartError` for settings that contradict each other, before anything is loaded."""
        if self.role == "completion" and not self.stop_preempted_request:
            raise EngineStartError(
                "--no-stop-preempted-request: a completion engine has no prefill and cannot compute a "
                "preempted request again; start it with --stop-preempted-request"
            )
