"""What every kind of discovery finds."""

from dataclasses import dataclass

from wire.services import EngineRole


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine of some role is to be asked who it is."""

    role: EngineRole
    url: str
    instance: str = ""
    """Tells engines that have the same address one after the other apart, such as a pod's uid."""


def base_url(scheme: str, address: str, port: int) -> str:
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
