"""The control port lets in whom it is told to: others are refused before their first word."""

import pytest
import zmq

from kv_transfer.errors import SettingsError
from kv_transfer.events import Arrived, Offered
from kv_transfer.gate import AddressGate
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.builders import FIRST, identity, offer
from tests.kv_transfer.ends import a_sink, a_source, address_of
from tests.system.processes import eventually

FROM_ANOTHER_ADDRESS = "tcp://127.0.0.2:0;"
"""Where the sink's own end of the connection is; written before the address it connects to."""


def connect_to(control_address: str) -> str:
    return FROM_ANOTHER_ADDRESS + control_address.removeprefix("tcp://")


def test_an_address_outside_the_allowed_networks_is_refused_and_the_sink_is_told_why() -> None:
    settings = TransferSettings(allowed_networks=("10.0.0.0/8",))
    with a_source(settings=settings) as source, a_sink() as sink:
        sink.sink.request("h", address_of(connect_to(source.source.control_address)))
        failed = sink.failure()
        assert failed.reason == "connect_failed"
        assert "its --control-allow" in failed.message
        refusals = source.source.stats
        eventually(lambda: refusals().refusals_by_field == {"address": 1}, "it is counted")


@pytest.mark.parametrize("networks", [(), ("10.0.0.0/8", "127.0.0.0/24")])
def test_an_allowed_address_is_served(networks: tuple[str, ...]) -> None:
    with a_source(settings=TransferSettings(allowed_networks=networks)) as source, a_sink() as sink:
        sink.sink.request("h", address_of(connect_to(source.source.control_address)))
        source.source.offer(offer())
        assert isinstance(sink.event(), Offered)
        sink.sink.pull("h", [7, 8])
        assert sink.event() == Arrived("h", FIRST)


def test_the_own_address_is_always_allowed() -> None:
    """An engine reads through its transport before it is ready."""
    with a_source(settings=TransferSettings(allowed_networks=("10.0.0.0/8",))) as source, a_sink() as sink:
        sink.sink.request("h", address_of(source.source.local_address))
        source.source.offer(offer())
        assert isinstance(sink.event(), Offered)


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.0.0.1", False),
        ("fd00::7", True),
        ("fe80::1", False),
        ("127.0.0.1", True),
        ("", False),
        ("a name", False),
    ],
)
def test_networks_of_both_families_are_told_apart(address: str, is_allowed: bool) -> None:
    with zmq.Context() as context:
        gate = AddressGate(context, ("10.0.0.0/8", "fd00::/8"))
        gate.admit("127.0.0.1")
        assert gate.allows(address) is is_allowed
        gate.close()


def test_a_network_that_is_none_is_named() -> None:
    with zmq.Context() as context, pytest.raises(SettingsError, match=r"10\.0\.0\.0/40"):
        AddressGate(context, ("10.0.0.0/40",))


def test_readers_that_are_turned_away_are_counted_by_what_differs() -> None:
    with a_source() as source, a_sink(own_identity=identity("completion-0", 9, made_up="x")) as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        assert sink.failure().reason == "incompatible"
        assert source.source.stats().refusals_by_field == {"other": 1}
    with a_source() as source, a_sink(own_identity=identity("completion-0", 9, dtype="int8")) as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        assert sink.failure().reason == "incompatible"
        assert source.source.stats().refusals_by_field == {"dtype": 1}
