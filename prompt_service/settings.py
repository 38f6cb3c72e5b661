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

    control_host: str = Field(
        "127.0.0.1", description="address the hand-over protocol binds; completion engines connect to it"
    )
    control_port: int = Field(0, ge=0, le=65535, description="0 takes a free port at every engine start")
    control_advertise_host: str | None = Field(
        None, description="address told to completion engines; default: --control-host"
    )

    chunk_handover: bool = Field(
        True, description="let completion engines read a prompt while it is computed; off: when it is whole"
    )

    def engine_config(
        self, role: EngineRole, engine_id: str, epoch: int, commands: str, events: str
    ) -> EngineConfig:
        return replace(
            super().engine_config(role, engine_id, epoch, commands, events),
            control_bind=f"tcp://{self.control_host}:{self.control_port}",
            control_advertise_host=self.control_advertise_host,
            chunk_handover=self.chunk_handover,
        )
