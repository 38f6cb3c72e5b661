"""EndpointSlices of one role: pure functions from what a cluster says to the endpoints that can be used.

An endpoint that is terminating or not ready is no endpoint. One address may stand in two slices while the
cluster moves it; it is out as soon as one of them says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from proxy.discovery.endpoints import Endpoint, base_url
from wire.services import EngineRole

PORT_NAME = "http"


@dataclass(frozen=True, slots=True)
class SliceEndpoint:
    """One address of one pod."""

    address: str
    port: int
    pod_uid: str
    is_usable: bool


@dataclass(frozen=True, slots=True)
class EndpointSlice:
    """What matters of an EndpointSlice; `name` is unique in its namespace."""

    name: str
    endpoints: tuple[SliceEndpoint, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """All slices there are; whatever else was known is gone."""

    slices: tuple[EndpointSlice, ...]
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """A slice that is new or has changed."""

    slice: EndpointSlice


@dataclass(frozen=True, slots=True)
class Deleted:
    name: str


SliceEvent: TypeAlias = Listed | Changed | Deleted


@dataclass(frozen=True, slots=True)
class SliceView:
    """The slices known, by name."""

    slices: Mapping[str, EndpointSlice] = field(default_factory=dict)

    def after(self, event: SliceEvent) -> "SliceView":
        match event:
            case Listed():
                return SliceView({each.name: each for each in event.slices})
            case Changed():
                return SliceView({**self.slices, event.slice.name: event.slice})
            case Deleted():
                return SliceView({name: each for name, each in self.slices.items() if name != event.name})

    def endpoints(self, role: EngineRole) -> tuple[Endpoint, ...]:
        """Those that can be used, one for each address, in the order of their URLs."""
        everywhere = [endpoint for each in self.slices.values() for endpoint in each.endpoints]
        out = {_pod_of(endpoint) for endpoint in everywhere if not endpoint.is_usable}
        usable = sorted(
            (base_url("http", endpoint.address, endpoint.port), endpoint.pod_uid)
            for endpoint in everywhere
            if _pod_of(endpoint) not in out
        )
        return tuple(Endpoint(role, url, uid) for url, uid in dict(usable).items())


def _pod_of(endpoint: SliceEndpoint) -> tuple[str, int, str]:
    return (endpoint.address, endpoint.port, endpoint.pod_uid)


def slice_from_json(value: Mapping[str, Any]) -> EndpointSlice:
    """An EndpointSlice of `discovery.k8s.io/v1`; `KeyError`, `TypeError` or `ValueError` where it is none."""
    port = _port(value.get("ports") or ())
    found = value.get("endpoints") or ()
    return EndpointSlice(
        name=str(value["metadata"]["name"]),
        endpoints=() if port is None else tuple(each for one in found for each in _endpoints(one, port)),
    )


def _port(ports: Sequence[Mapping[str, Any]]) -> int | None:
    """The port named `http`, or the only one there is; None where a slice has no port yet."""
    named = [port for port in ports if port.get("name") == PORT_NAME]
    chosen = (named or (ports if len(ports) == 1 else ()))[:1]
    return int(chosen[0]["port"]) if chosen and chosen[0].get("port") is not None else None


def _endpoints(value: Mapping[str, Any], port: int) -> Iterable[SliceEndpoint]:
    conditions = value.get("conditions") or {}
    # An absent `ready` means ready, an absent `terminating` means that it goes on.
    is_usable = conditions.get("ready") is not False and not conditions.get("terminating")
    uid = str((value.get("targetRef") or {}).get("uid") or "")
    for address in value.get("addresses") or ():
        yield SliceEndpoint(str(address), port, uid, is_usable)
