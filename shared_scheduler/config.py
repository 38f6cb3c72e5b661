"""Everything a scheduler is told once, checked for contradictions when it is built."""

import hashlib
from dataclasses import dataclass, fields
from enum import Enum

from shared_scheduler.errors import ConfigError

RANK_LOCAL_FIELDS = frozenset({"num_blocks", "num_state_slots"})
"""May differ between ranks of a group: pool sizes follow each rank's own memory."""


class EngineType(Enum):
    """Which kinds of step an engine runs."""

    NORMAL = "normal"
    PROMPT = "prompt"
    COMPLETION = "completion"


class WaitingPolicy(Enum):
    """Which of the waiting requests is admitted first."""

    FCFS = "fcfs"
    LPM = "lpm"
    """Longest prefix in the cache."""
    DFS_WEIGHT = "dfs-weight"
    """Depth first through the cached prefixes, the branch that most wait for first."""
    LOF = "lof"
    """Largest `max_tokens`."""
    RANDOM = "random"
    ROUTING_KEY = "routing-key"
    """The routing key of which most requests are being served."""
    PRIORITY = "priority"
    """Highest priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of one scheduler. `ConfigError` names the two values that contradict."""

    engine_type: EngineType
    block_size: int
    """Tokens whose KV one block holds."""
    num_blocks: int
    """Size of the block pool, the null block 0 included."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Tokens of one prompt step."""
    max_model_len: int
    """A sequence may hold this many tokens and is ended by the next one."""
    max_chunk_tokens: int | None = None
    """Tokens of one prompt in one step at most; None: all that the step has room for."""
    max_scored_tokens: int | None = None
    """Tokens in one step of prompts whose log probabilities are asked for: their logits are all kept."""
    num_state_slots: int | None = None
    """Size of the state pool, the null slot 0 included; None: the model keeps no fixed-size state."""
    sliding_window: int | None = None
    """Every layer sees at most this many tokens, itself included; None: some layer sees all of them."""
    chunked_prefill: bool = True
    stop_preempted_request: bool = True
    """End a preempted request (True) or put it back to be computed again (False)."""
    waiting_policy: WaitingPolicy = WaitingPolicy.FCFS
    waiting_age_limit: int = 64
    """Prompt steps in which a waiting request may be passed over before it goes first."""
    waiting_seed: int = 0
    """Of the policy `random`."""
    sharing_tokens: int = 32
    """A shared prefix this much longer than what is cached makes a request wait until it is computed."""
    retract_cheapest: bool = False
    """Preempt the sequence that is cheapest to lose (`retraction`), not the one with the longest output."""
    test_retract_interval: int | None = None
    """Put a running sequence back every so many decode steps, to test that answers do not change."""
    prefill_attempt_interval: int = 70
    """Decode steps between two points at which a prompt step is tried if every rank wants it."""
    prefill_any_attempt_interval: int = 100
    """Decode steps between two points at which one rank that wants a prompt step is enough."""
    prefill_watermark: float = 0.9
    """Share of used blocks above which no new prompt is started."""
    prefill_max_sum_seqlen_k: int | None = None
    """Bound on the sum of sequence lengths of one prompt step (attention workspace); None: no bound."""
    lookahead_tokens: int = 0
    """Shortest chunk, but for the last piece of a prompt."""
    cp_size: int = 1
    """Context-parallel ranks; chunks are cut at multiples of 2 * cp_size when above 1."""
    eos_token_ids: tuple[int, ...] = ()
    max_num_draft_tokens: int = 0
    image_pad_token_id: int | None = None
    """Placeholder token of image patches; a run of them is never cut."""
    image_start_token_id: int | None = None
    preempt_only_on_need: bool = True
    """Off: decide exactly as the reference does, its known faults included (docs/decisions)."""
    prefix_cache: bool = False
    """Keep computed blocks when their sequences let go, and start prompts behind what is kept of them."""
    state_snapshot_blocks: int = 32
    """A model with state: blocks of a prompt between two states that the prefix cache keeps. One more is kept
    at the prompt's last full block."""
    cache_events: bool = False
    """Collect what changes in the prefix cache for `take_cache_events`."""
    partial_pulls: bool = False
    """COMPLETION: `reserve_remote` puts cached blocks at the head of the table, which no transfer may write
    (`hit_tokens`). Off: the transfer fills the whole table, and the cache only keeps what has arrived."""
    remote_growth_tokens: int = 512
    """COMPLETION: room kept free for one running sequence while others wait for remote KV."""
    admission_estimate: bool = False
    """Admit only what fits the pool with the output that everybody is expected to generate."""
    new_token_ratio_floor: float = 0.1
    """Lowest share of its remaining `max_tokens` that a sequence is expected to use."""
    new_token_ratio_decay_steps: int = 600
    """Decode steps in which that share falls from 1 to the floor."""
    runtime_max_model_len: int | None = None
    """Rows of the worker's position tables; None: max_model_len + 2 * max_num_draft_tokens."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_contradictions()

    @property
    def cut_alignment(self) -> int:
        """A cut chunk is a multiple of this many tokens (zigzag context parallelism needs pairs)."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def min_chunk(self) -> int:
        return max(self.lookahead_tokens, 1)

    @property
    def prompt_limit(self) -> int:
        """Longest sequence that may be prefilled."""
        if self.chunked_prefill:
            return self.max_model_len
        return min(self.max_model_len, self.max_num_batched_tokens)

    @property
    def position_limit(self) -> int:
        if self.runtime_max_model_len is not None:
            return self.runtime_max_model_len
        return self.max_model_len + 2 * self.max_num_draft_tokens

    @property
    def num_draft_slots(self) -> int:
        """Twice the sequences: what ended in a step that still runs keeps its slot until results are in."""
        drafts_here = self.max_num_draft_tokens and self.engine_type is not EngineType.PROMPT
        return 2 * self.max_num_seqs if drafts_here else 0

    @property
    def max_blocks_per_sequence(self) -> int:
        return -(-(self.max_model_len + 1 + self.max_num_draft_tokens) // self.block_size)

    def digest_fields(self) -> dict[str, str]:
        """The options that ranks of one group must share, as text."""
        return {
            item.name: str(getattr(self, item.name))
            for item in fields(self)
            if item.name not in RANK_LOCAL_FIELDS
        }

    def digest(self) -> int:
        """A 62-bit digest of `digest_fields`, the same on every machine."""
        text = "\n".join(f"{name}={value}" for name, value in self.digest_fields().items())
        return self.hash_text(text)

    @staticmethod
    def hash_text(text: str) -> int:
        """62 bits of a text."""
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2

    def _check_ranges(self) -> None:
        at_least_one = (
            "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "cp_size",
            "prefill_attempt_interval", "prefill_any_attempt_interval", "state_snapshot_blocks",
        )  # fmt: skip
        for name in at_least_one:
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lookahead_tokens", "max_num_draft_tokens", "remote_growth_tokens"):
            _require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}")
        _require(
            self.num_blocks >= 2,
            f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}",
        )
        _require(
            0.0 < self.prefill_watermark <= 1.0,
            f"prefill_watermark must be above 0 and at most 1, got {self.prefill_watermark}",
        )
        _require(
            self.num_state_slots is None or self.num_state_slots >= 2,
            f"num_state_slots={self.num_state_slots} leaves a stateful model without a usable slot (slot 0 is"
            " the null slot): raise num_state_slots to at least 2, or set None for a model without state",
        )
        _require(
            self.sliding_window is None or self.sliding_window >= 1,
            f"sliding_window must be at least 1, got {self.sliding_window}",
        )
        _require(
            self.prefill_max_sum_seqlen_k is None or self.prefill_max_sum_seqlen_k >= 1,
            f"prefill_max_sum_seqlen_k must be at least 1, got {self.prefill_max_sum_seqlen_k}",
        )

    def _check_contradictions(self) -> None:
        self._check_admission()
        self._check_retraction()
        self._check_waiting()
        budget, limit = self.max_num_batched_tokens, self.max_model_len
        _require(
            self.engine_type is not EngineType.COMPLETION or self.stop_preempted_request,
            "engine_type=completion with stop_preempted_request=False: a completion engine has no prefill"
            " channel and cannot recompute; set stop_preempted_request=True",
        )
        _require(
            self.chunked_prefill or budget >= limit,
            f"max_num_batched_tokens={budget} is below max_model_len={limit} without chunked prefill:"
            " raise max_num_batched_tokens or set chunked_prefill=True",
        )
        _require(
            budget // self.cut_alignment * self.cut_alignment >= self.min_chunk,
            f"max_num_batched_tokens={budget} holds no chunk of lookahead_tokens={self.lookahead_tokens}"
            f" aligned to {self.cut_alignment} (cp_size={self.cp_size}): raise max_num_batched_tokens",
        )
        _require(
            self.num_state_slots is None or not self.max_num_draft_tokens,
            f"max_num_draft_tokens={self.max_num_draft_tokens} with num_state_slots={self.num_state_slots}: a"
            " model's fixed-size state cannot be wound back over rejected drafts; set max_num_draft_tokens=0"
            " (--speculative off)",
        )
        _require(
            self.image_start_token_id is None or self.image_pad_token_id is not None,
            f"image_start_token_id={self.image_start_token_id} without image_pad_token_id: set both or none",
        )
        _require(
            self.position_limit >= limit + 2 * self.max_num_draft_tokens,
            f"runtime_max_model_len={self.runtime_max_model_len} is below max_model_len={limit}"
            f" + 2 * max_num_draft_tokens={self.max_num_draft_tokens}: raise runtime_max_model_len",
        )

    def _check_admission(self) -> None:
        ratio, steps = self.new_token_ratio_floor, self.new_token_ratio_decay_steps
        _require(0.0 < ratio <= 1.0, f"new_token_ratio_floor must be above 0 and at most 1, got {ratio}")
        _require(steps >= 1, f"new_token_ratio_decay_steps must be at least 1, got {steps}")
        _require(
            not (self.admission_estimate and self.engine_type is EngineType.PROMPT),
            "admission_estimate=True with engine_type=prompt: a prompt engine has no output to estimate",
        )
        self._check_scored()
        chunk = self.max_chunk_tokens
        if chunk is None:
            return
        _require(
            self.chunked_prefill,
            f"max_chunk_tokens={chunk} without chunked prefill: set chunked_prefill=True",
        )
        _require(
            chunk // self.cut_alignment * self.cut_alignment >= self.min_chunk,
            f"max_chunk_tokens={chunk} holds no chunk of lookahead_tokens={self.lookahead_tokens}"
            f" aligned to {self.cut_alignment} (cp_size={self.cp_size}): raise max_chunk_tokens",
        )

    def _check_scored(self) -> None:
        scored = self.max_scored_tokens
        _require(
            scored is None or scored // self.cut_alignment * self.cut_alignment >= self.min_chunk,
            f"max_scored_tokens={scored} holds no chunk of lookahead_tokens={self.lookahead_tokens}"
            f" aligned to {self.cut_alignment} (cp_size={self.cp_size}): raise max_scored_tokens",
        )

    def _check_retraction(self) -> None:
        interval = self.test_retract_interval
        _require(
            self.preempt_only_on_need or not self.retract_cheapest,
            "retract_cheapest=True with preempt_only_on_need=False: the reference takes the longest output",
        )
        if interval is None:
            return
        _require(interval >= 1, f"test_retract_interval must be at least 1, got {interval}")
        _require(
            self.retract_cheapest and not self.stop_preempted_request,
            f"test_retract_interval={interval} would end requests: set retract_cheapest=True and"
            " stop_preempted_request=False",
        )

    def _check_waiting(self) -> None:
        policy = self.waiting_policy
        for name in ("waiting_age_limit", "sharing_tokens"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(
            policy not in (WaitingPolicy.LPM, WaitingPolicy.DFS_WEIGHT) or self.prefix_cache,
            f"waiting_policy={policy.value} with prefix_cache=False: there are no prefixes to order by",
        )
        _require(
            policy is WaitingPolicy.FCFS or self.engine_type is not EngineType.COMPLETION,
            f"waiting_policy={policy.value} with engine_type=completion: nothing waits for prefill there",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
