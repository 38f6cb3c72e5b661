"""Flags and environment variables of the proxy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from proxy.role_policies import PolicyName
from settings.loading import ProcessSettings
from wire.services import EngineRole

Origins = Annotated[tuple[str, ...], NoDecode]
Urls = Annotated[tuple[str, ...], NoDecode]


MAX_WORKERS = 64


class ProxySettings(ProcessSettings):
    """Settings of one proxy process; lists come from a repeated flag or a comma-separated variable."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_PROXY_")

    host: str = Field("127.0.0.1", description="address the HTTP server binds")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    grace_s: float = Field(30.0, ge=0, description="how long running requests may go on after SIGTERM")
    workers: int = Field(
        1,
        ge=1,
        le=MAX_WORKERS,
        description="processes that serve the port, each with its own links to engines",
    )
    worker_number: int = Field(0, ge=0, description="set by --workers: which of them this process is")
    worker_directory: Path | None = Field(None, description="set by --workers: what they share")
    worker_socket: int | None = Field(
        None, ge=0, description="set by --workers: descriptor of the socket they listen on"
    )

    model: str = Field(
        "smollm2-135m-instruct",
        description="the embedded model's name, a directory in Hugging Face layout, or a GGUF file",
    )
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="format of tool calls; auto takes the one of the model's chat template"
    )
    prompt_url: Urls = Field((), description="base URL of a prompt service; repeatable")
    completion_url: Urls = Field((), description="base URL of a completion service; repeatable")
    normal_url: Urls = Field((), description="base URL of a NORMAL engine's service; repeatable")
    refresh_s: float = Field(1.0, gt=0, description="how often each engine is asked who and how it is")

    discovery: Literal["static", "dns", "kubernetes"] = Field(
        "static",
        description="where engines are: at the URLs; at every address of the URLs' names; or in the "
        "EndpointSlices that the selectors find",
    )
    discovery_namespace: str | None = Field(
        None, description="namespace of the EndpointSlices; default: the one of this pod"
    )
    prompt_selector: str | None = Field(
        None,
        description="labels of prompt engines' EndpointSlices, such as kubernetes.io/service-name=my-prompt",
    )
    completion_selector: str | None = Field(None, description="the same for completion engines")
    normal_selector: str | None = Field(None, description="the same for NORMAL engines")
    discovery_relist_s: float = Field(
        30.0, ge=1, description="how often all EndpointSlices are listed anew, beside being watched"
    )
    dns_refresh_s: float = Field(5.0, gt=0, description="how often names are resolved (--discovery dns)")

    token_link: bool = Field(
        True, description="one connection per completion engine for all streams, where the engine has it"
    )
    prompt_policy: PolicyName = Field("prefix", description="how a prompt engine is chosen")
    completion_policy: PolicyName = Field("prefix", description="how a completion engine is chosen")
    normal_policy: PolicyName = Field("round_robin", description="how a NORMAL engine is chosen")
    zone: str | None = Field(None, description="engines of this zone come first; see the services' --zone")
    normal_max_new_tokens: int | None = Field(
        None,
        ge=0,
        description="prompts with at most so many tokens to compute go to NORMAL engines; default: none do "
        "while there is a pair",
    )
    cors_origins: Origins = Field(
        (), description="web pages of this origin may call the API from a browser; repeatable, * for all"
    )
    api_keys: SecretStr | None = Field(
        None, description="API keys, comma-separated; better as a variable: arguments are visible to others"
    )
    api_keys_file: Path | None = Field(
        None, description="file with an API key a line, read again when it changes; none: everybody is served"
    )
    service_token: SecretStr | None = Field(
        None, description="what engines want to see; better as a variable"
    )
    service_token_file: Path | None = Field(
        None, description="file whose first line is the service token, read again when it changes"
    )

    max_body_bytes: int = Field(8 << 20, gt=0, description="larger request bodies are refused with 413")
    body_timeout_s: float = Field(30.0, gt=0, description="how long a client may take to send its body")
    client_stall_timeout_s: float = Field(60.0, gt=0, description="wait for a client that does not read")
    client_backlog_bytes: int = Field(
        1 << 20, gt=0, description="what a stream's client may leave unread before it is given up"
    )
    connect_timeout_s: float = Field(2.0, gt=0, description="wait for a connection to an engine")
    first_byte_timeout_s: float = Field(120.0, gt=0, description="wait for an engine's first token")
    stall_timeout_s: float = Field(60.0, gt=0, description="wait for an engine's next token")

    first_token_limit_s: float | None = Field(
        None,
        gt=0,
        description="requests whose first token would come later are refused with 429; default: none",
    )
    max_prompt_tokens_under_way: int | None = Field(
        None,
        gt=0,
        description="prompt tokens that engines get at once, the rest waits by priority; default: all",
    )
    max_waiting_requests: int = Field(
        1000, ge=0, description="more requests than this do not wait for their turn: 429"
    )
    key_requests_per_s: float | None = Field(None, gt=0, description="of one API key; default: no limit")
    key_burst: int = Field(20, ge=1, description="requests of one API key that may come at once")
    key_max_open: int | None = Field(
        None, ge=1, description="open requests of one API key; default: no limit"
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="a request is ended after this time; clients may ask for less with the header "
        "x-request-timeout-s",
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are refused with 400")
    max_completion_tokens: int | None = Field(None, ge=1, description="a request may not ask for more")

    max_migrations: int = Field(
        5, ge=0, description="how often a stream may go on elsewhere when its engines fail; 0: never"
    )
    migration_wait_s: float = Field(
        15.0, ge=0, description="how long a broken stream may wait for engines that can go on with it"
    )

    def share_of(self, limit: int) -> int:
        """This worker's part of a limit that all of them keep together."""
        return max(1, limit // self.workers)

    @property
    def engine_urls(self) -> Mapping[EngineRole, tuple[str, ...]]:
        return {"prompt": self.prompt_url, "completion": self.completion_url, "normal": self.normal_url}

    @property
    def selectors(self) -> Mapping[EngineRole, str]:
        """Those that are set."""
        selectors: dict[EngineRole, str | None] = {
            "prompt": self.prompt_selector,
            "completion": self.completion_selector,
            "normal": self.normal_selector,
        }
        return {role: selector for role, selector in selectors.items() if selector}

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        is_cluster = self.discovery == "kubernetes"
        for role, urls in self.engine_urls.items():
            if is_cluster and urls:
                raise ValueError(
                    f"--{role}-url does not go with --discovery kubernetes; use --{role}-selector"
                )
            if self.discovery == "dns" and any(url.startswith("https:") for url in urls):
                raise ValueError(
                    f"--{role}-url must be http with --discovery dns: certificates name no address"
                )
        if not is_cluster and self.selectors:
            role = next(iter(self.selectors))
            raise ValueError(f"--{role}-selector needs --discovery kubernetes, not {self.discovery}")
        if is_cluster and not self.selectors:
            raise ValueError("--discovery kubernetes needs --prompt-selector and --completion-selector")
        return self

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> tuple[str, ...]:
        parts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
        origins = [origin.strip().rstrip("/") for part in parts for origin in str(part).split(",")]
        for origin in origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ValueError("an origin is * or starts with http:// or https://")
        return tuple(dict.fromkeys(origins))

    @field_validator("prompt_url", "completion_url", "normal_url", mode="before")
    @classmethod
    def _split_urls(cls, value: object) -> tuple[str, ...]:
        parts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
        urls = [url.strip().rstrip("/") for part in parts for url in str(part).split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError("an engine's URL must start with http:// or https://")
            if "@" in url:
                raise ValueError("an engine's URL has no user; engines take --service-token")
        return tuple(dict.fromkeys(urls))
