"""Flags `--name` and variables `TANDEM_PROMPT_NAME` of the prompt service."""

from dataclasses import replace

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from engine.config import EngineConfig
from engine.serving.settings import EngineServiceSettings
from wire.services import EngineRole


class PromptServiceSettings(EngineServiceSettings):
    """Tandem's prompt service: chunked prefill and nothing else."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_PROMPT_")

    chunk_handover: bool = Field(
        True, description="let completion engines read a prompt while it is computed; off: when it is whole"
    )

    pull_back_min_tokens: int = Field(
        128, ge=1, description="fetch cached blocks from completion engines where they save so many tokens"
    )
    pull_back_wait_s: float = Field(2.0, gt=0, description="how long a prompt may wait for them")

    def engine_config(
        self, role: EngineRole, engine_id: str, epoch: int, commands: str, events: str
    ) -> EngineConfig:
        return replace(
            super().engine_config(role, engine_id, epoch, commands, events),
            chunk_handover=self.chunk_handover,
            pull_back_min_tokens=self.pull_back_min_tokens,
            pull_back_wait_s=self.pull_back_wait_s,
        )
