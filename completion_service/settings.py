"""Flags `--name` and variables `TANDEM_COMPLETION_NAME` of the completion service."""

from dataclasses import replace
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from engine.config import EngineConfig, SpeculativeMethod
from engine.serving.settings import EngineServiceSettings
from wire.services import EngineRole

OWN_ENGINE_FIELDS = (
    "handover_wait_s",
    "min_self_test_rate",
    "room_wait_s",
    "arrival_share",
    "speculative",
    "draft_model",
    "draft_kv_bytes",
    "num_draft_tokens",
    "admission_estimate",
    "retract_cheapest",
    "test_retract_interval",
    "prefill_attempt_interval",
    "prefill_any_attempt_interval",
    "dp_size",
    "dp_rank",
    "dp_address",
    "dp_step_timeout_s",
)
"""Fields of an engine's configuration that a prompt engine has no use for."""


class CompletionServiceSettings(EngineServiceSettings):
    """Tandem's completion service: decodes sequences that prompt engines hand over."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_COMPLETION_")

    port: int = Field(7002, ge=0, le=65535, description="port of the HTTP server; 0 takes a free one")
    engine: Literal["completion", "normal"] = Field(
        "completion", description="normal: one engine that prefills and decodes, without hand-overs"
    )
    min_self_test_rate: float = Field(
        100e6,
        gt=0,
        description="bytes/s; a prompt engine that is read more slowly at first contact is a warning",
    )
    handover_wait_s: float = Field(
        150.0,
        gt=0,
        description="how long a request may wait for its KV blocks, its prompt engine's queue included, or"
        " for room for them",
    )
    room_wait_s: float = Field(
        60.0,
        gt=0,
        description="how long a hand-over may wait for room here before it is left to another engine",
    )
    arrival_share: float = Field(
        0.5, gt=0, le=1, description="part of the KV pool that sequences on their way here may take"
    )
    speculative: SpeculativeMethod = Field(
        "off",
        description="ngram: guess that the text goes on as it did before, verify several tokens a step;"
        " model: guess with --draft-model",
    )
    draft_model: str | None = Field(
        None, description="a smaller model with the same tokenizer, in any form that --model takes"
    )
    draft_kv_bytes: int = Field(
        256 << 20, ge=1 << 20, description="memory for keys and values of the draft model"
    )
    num_draft_tokens: int = Field(
        4, ge=1, le=16, description="tokens guessed for a sequence in a step at most"
    )
    admission_estimate: bool | None = Field(
        None,
        description="keep requests waiting while the pool has no room for the output that is expected of all;"
        " default: on, but off with --engine normal",
    )
    retract_cheapest: bool = Field(
        False, description="when KV blocks run out, the fewest outputs give way, not the longest"
    )
    test_retract_interval: int | None = Field(
        None, ge=1, description="normal, for tests: put a sequence back every so many decode steps"
    )
    prefill_attempt_interval: int = Field(
        70, ge=1, description="normal: decode steps between prompt steps that every rank wants"
    )
    prefill_any_attempt_interval: int = Field(
        100, ge=1, description="normal: decode steps between prompt steps that any rank wants"
    )
    dp_size: int = Field(1, ge=1, description="normal: engines that step alike, each in its own service")
    dp_rank: int = Field(0, ge=0, description="which of them this is, from 0")
    dp_address: str | None = Field(
        None, description="host:port where rank 0 listens for the others; equal on all ranks"
    )
    dp_step_timeout_s: float = Field(
        300.0, gt=0, description="how long a living rank may keep the others waiting for its next step"
    )

    @property
    def hands_over(self) -> bool:
        return self.engine == "completion"

    def engine_config(
        self, role: EngineRole, engine_id: str, epoch: int, commands: str, events: str
    ) -> EngineConfig:
        base = super().engine_config(role, engine_id, epoch, commands, events)
        return replace(base, **{name: getattr(self, name) for name in OWN_ENGINE_FIELDS})
