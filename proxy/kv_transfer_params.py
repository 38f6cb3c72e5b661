"""The field with which public prefill/decode routers drive engines; `single_legs` serves it."""

from typing import Any, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from proxy.body_parsing import Strict

FIELD = "kv_transfer_params"


class KvTransferParams(Strict):
    """As public routers send them; `tandem` is ours."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    """Not used, like `remote_port` and `remote_block_ids`: the engine's own address is known by its id."""
    tandem: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one_leg(self) -> Self:
        if self.do_remote_decode and self.do_remote_prefill:
            raise PydanticCustomError("invalid", "asks for both legs", {"field": "do_remote_prefill"})
        if self.do_remote_prefill and (self.remote_engine_id is None or self.tandem is None):
            missing = "remote_engine_id" if self.remote_engine_id is None else "tandem"
            raise PydanticCustomError(
                "missing", "must be passed on as the prompt engine's answer has it", {"field": missing}
            )
        return self

    @property
    def is_of_leg(self) -> bool:
        """Routers may also send the field with nothing asked for."""
        return bool(self.do_remote_decode or self.do_remote_prefill)
