"""Flags `--name` and variables `TANDEM_COMPLETION_NAME` of the completion service."""

from dataclasses import replace
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from engine.config import EngineConfig
from engine.serving.settings import EngineServiceSettings
from wire.services import EngineRole


class CompletionServiceSettings(EngineServiceSettings):
    """Tandem's completion service: decodes sequences that prompt engines hand over."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_COMPLETION_")

    port: int = Field(7002, ge=0, le=65535, description="port of the HTTP server; 0 takes a free one")
    engine: Literal["completion", "normal"] = Field(
        "completion", description="normal: one engine that prefills and decodes, without hand-overs"
    )
    handover_wait_s: float = Field(
        60.0, gt=0, description="how long a request may wait for its KV blocks, or for room for them"
    )

    def engine_config(
        self, role: EngineRole, engine_id: str, epoch: int, commands: str, events: str
    ) -> EngineConfig:
        base = super().engine_config(role, engine_id, epoch, commands, events)
        return replace(base, handover_wait_s=self.handover_wait_s)
