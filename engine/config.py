"""What an engine process needs to know; the service builds it from its settings and hands it over as JSON."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineStartError
from wire.services import EngineRole

SpeculativeMethod = Literal["off", "ngram", "model"]
"""Where drafts come from; ngram: what followed the newest tokens when they stood in the text before; model: a
smaller model with the same tokenizer."""


KernelChoice = Literal["auto", "native", "torch"]
DeviceName = Literal["auto", "cpu", "cuda"]

WaitingPolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine process. Sizes in tokens unless a name says bytes, blocks or seconds."""

    role: EngineRole
    engine_id: str
    epoch: int
    model: str
    dtype: str = "fp16w"
    device: DeviceName = "auto"
    """auto: a GPU where there is one and `dtype` is bf16, else the CPU."""
    kernels: KernelChoice = "auto"
    """What computes the model: the compiled kernels, torch, or whichever of them there is."""
    num_threads: int = 1

    block_size: int = 32
    kv_bytes: int = 1 << 30
    state_bytes: int | None = None
    """Of a model with per-sequence states; None: two slots for each of `max_num_seqs`, up to `kv_bytes`."""
    max_model_len: int | None = None
    """None takes the model's own limit, or less where the KV pool is smaller than that."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    """Start prompts behind what earlier requests have left of them in the KV pool."""
    overlap: bool = False
    """Results are processed one step late, while the model runs."""
    stop_preempted_request: bool = True
    """False computes a preempted sequence again; a completion engine cannot."""

    speculative: SpeculativeMethod = "off"
    draft_model: str | None = None
    draft_kv_bytes: int = 256 << 20
    num_draft_tokens: int = 4
    """Drafts verified for a sequence in a step at most."""

    waiting_policy: WaitingPolicyName = "fcfs"
    waiting_age_limit: int = 64
    """Prompt steps in which a request may be passed over before it goes first."""
    max_chunk_tokens: int | None = None
    """Tokens of one prompt in a step at most; None: all that fit."""

    retract_cheapest: bool = False
    """Preempt the sequence that is cheapest to lose, not the one with the longest output."""
    test_retract_interval: int | None = None
    """Decode steps of a NORMAL engine between forced retractions, for tests."""

    admission_estimate: bool | None = None
    """Admit only what fits the pool with everybody's expected output; None: in a completion engine."""

    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    """Decode steps of a NORMAL engine between points where a prompt step may be tried."""

    tp: int = 1
    """Ranks that share out the model: processes of this machine that compute every step together."""
    tp_timeout_s: float = 20.0
    """How long a rank may keep the others waiting within a step."""

    dp_size: int = 1
    dp_rank: int = 0
    dp_address: str | None = None
    """NORMAL engines that step alike: how many, which one this is, and where rank 0 listens (host:port)."""
    dp_step_timeout_s: float = 300.0
    """How long a rank that lives may keep the others waiting."""

    transport: str = "auto"
    nixl_backend: str = "UCX"
    require_rdma: bool = False
    verify_kv: bool = False
    """Digests of handed-over blocks are sent, or checked."""
    min_self_test_rate: float = 100e6
    """Bytes per second; a completion engine warns of a prompt engine that it reads from more slowly."""
    control_bind: str = "tcp://127.0.0.1:0"
    control_advertise_host: str | None = None
    control_allow: str | None = None
    """Networks that may connect, comma-separated; None: everybody."""
    lease_s: float = 10.0
    chunk_handover: bool = True
    """A prompt engine lets readers begin before the whole prompt is computed."""
    pull_back: bool = True
    """A prompt engine borrows cached blocks from completion engines, which lend them."""
    pull_back_min_tokens: int = 128
    pull_back_wait_s: float = 2.0
    handover_wait_s: float = 150.0
    """How long a completion engine keeps a request that waits for its KV blocks or for room for them."""
    room_wait_s: float = 60.0
    """How long a hand-over that could be read waits for room before it is left to another engine."""
    arrival_share: float = 0.5
    """Of a completion engine's pool, for sequences on their way there."""

    log_level: str = "info"
    peak_gflops: float | None = None
    """GFLOP/s that count as full use in the log; None measures a float32 matrix product."""

    command_endpoint: str
    event_endpoint: str
    """ZMQ ipc endpoints, bound by the service: commands flow to the engine, events flow back."""

    @property
    def max_num_draft_tokens(self) -> int:
        """A prompt engine drafts nothing, whatever it is told."""
        return 0 if self.role == "prompt" or self.speculative == "off" else self.num_draft_tokens

    @property
    def has_admission_estimate(self) -> bool:
        return self.role == "completion" if self.admission_estimate is None else self.admission_estimate

    def check(self) -> None:
        """`EngineStartError` for settings that contradict each other, before anything is loaded."""
        self._check_group()
        if self.role != "prompt" and (self.speculative == "model") != (self.draft_model is not None):
            raise EngineStartError(
                f"--speculative {self.speculative} with --draft-model {self.draft_model}: a draft model "
                "needs --speculative model, and that needs --draft-model PATH"
            )
        if self.tp < 1:
            raise EngineStartError(f"--tp {self.tp}: an engine has at least one rank")
        if self.role == "completion" and not self.stop_preempted_request:
            raise EngineStartError(
                "--no-stop-preempted-request: a completion engine has no prefill and cannot compute a "
                "preempted request again; start it with --stop-preempted-request"
            )
        if self.role == "completion" and self.waiting_policy != "fcfs":
            raise EngineStartError(
                f"--waiting-policy {self.waiting_policy}: nothing waits for prefill in a completion engine; "
                "give the option to prompt engines"
            )

    def _check_group(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise EngineStartError(
                f"--dp-rank {self.dp_rank} is no rank of --dp-size {self.dp_size}; ranks count from 0"
            )
        if self.dp_size == 1:
            return
        if self.role != "normal":
            raise EngineStartError(f"--dp-size {self.dp_size} needs --engine normal, this is {self.role}")
        host, _, port = (self.dp_address or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise EngineStartError(
                f"--dp-size {self.dp_size} needs --dp-address HOST:PORT, where rank 0 listens; "
                f"got {self.dp_address!r}"
            )
