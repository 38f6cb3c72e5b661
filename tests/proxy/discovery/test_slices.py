"""What a cluster says of a role's EndpointSlices, and the engines that follow from it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.discovery.endpoints import Endpoint
from proxy.discovery.slices import (
    Changed,
    Deleted,
    EndpointSlice,
    Listed,
    SliceEndpoint,
    SliceEvent,
    SliceView,
    slice_from_json,
)


def pod(number: int, *, is_usable: bool = True, uid: str | None = None) -> SliceEndpoint:
    return SliceEndpoint(f"10.0.0.{number}", 7001, f"pod-{number}" if uid is None else uid, is_usable)


def piece(name: str, *endpoints: SliceEndpoint) -> EndpointSlice:
    return EndpointSlice(name, endpoints)


def engine(number: int, uid: str | None = None) -> Endpoint:
    return Endpoint("prompt", f"http://10.0.0.{number}:7001", f"pod-{number}" if uid is None else uid)


def after(*events: SliceEvent) -> tuple[Endpoint, ...]:
    view = SliceView()
    for event in events:
        view = view.after(event)
    return view.endpoints("prompt")


def test_the_endpoints_of_all_slices_are_engines() -> None:
    assert after(Listed((piece("a", pod(2)), piece("b", pod(1))))) == (engine(1), engine(2))


def test_a_change_replaces_one_slice() -> None:
    listed = Listed((piece("a", pod(1), pod(2)), piece("b", pod(3))))
    assert after(listed, Changed(piece("a", pod(2)))) == (engine(2), engine(3))


def test_a_deleted_slice_takes_its_endpoints_along() -> None:
    listed = Listed((piece("a", pod(1)), piece("b", pod(3))))
    assert after(listed, Deleted("a"), Deleted("never-seen")) == (engine(3),)


def test_an_endpoint_that_cannot_be_used_is_none() -> None:
    assert after(Listed((piece("a", pod(1, is_usable=False), pod(2)),))) == (engine(2),)


def test_a_pod_in_two_slices_is_out_as_soon_as_one_of_them_says_so() -> None:
    assert after(Listed((piece("a", pod(1)), piece("b", pod(1))))) == (engine(1),)
    assert after(Listed((piece("a", pod(1)), piece("b", pod(1, is_usable=False))))) == ()


def test_an_address_whose_old_pod_is_terminating_belongs_to_the_new_one() -> None:
    old, new = pod(1, uid="old", is_usable=False), pod(1, uid="new")
    assert after(Listed((piece("a", new, old),))) == (engine(1, uid="new"),)


def as_json(name: str, *endpoints: dict[str, Any], ports: object = ()) -> dict[str, Any]:
    return {"metadata": {"name": name}, "endpoints": endpoints, "ports": ports}


HTTP = {"name": "http", "port": 7001}
ADDRESS = {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "uid": "pod-1"}}


@pytest.mark.parametrize(
    ("conditions", "is_usable"),
    [
        ({"ready": True}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({}, True),
        ({"ready": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "terminating": True}, False),
    ],
)
def test_an_endpoint_is_usable_while_it_is_ready_and_not_terminating(
    conditions: dict[str, object], is_usable: bool
) -> None:
    parsed = slice_from_json(as_json("a", {**ADDRESS, "conditions": conditions}, ports=[HTTP]))
    assert parsed == piece("a", pod(1, is_usable=is_usable))


def test_the_port_named_http_counts_or_the_only_one() -> None:
    metrics = {"name": "control", "port": 9000}
    assert slice_from_json(as_json("a", ADDRESS, ports=[metrics, HTTP])) == piece("a", pod(1))
    assert slice_from_json(as_json("a", ADDRESS, ports=[{"name": "", "port": 7001}])) == piece("a", pod(1))
    assert slice_from_json(as_json("a", ADDRESS, ports=[metrics, {"name": "x", "port": 1}])) == piece("a")
    assert slice_from_json(as_json("a", ADDRESS, ports=None)) == piece("a")


def test_a_slice_without_endpoints_and_an_endpoint_without_a_pod() -> None:
    assert slice_from_json({"metadata": {"name": "a"}, "endpoints": None, "ports": [HTTP]}) == piece("a")
    ipv6 = {"addresses": ["fd00::1"]}
    view = SliceView().after(Listed((slice_from_json(as_json("a", ipv6, ports=[HTTP])),)))
    assert view.endpoints("normal") == (Endpoint("normal", "http://[fd00::1]:7001"),)


endpoints = st.builds(
    lambda number, is_usable: pod(number, is_usable=is_usable), st.integers(1, 4), st.booleans()
)
slices = st.builds(
    lambda name, some: EndpointSlice(name, tuple(some)),
    st.sampled_from("abc"),
    st.lists(endpoints, max_size=4),
)
listings = st.lists(slices, max_size=3, unique_by=lambda each: each.name).map(
    lambda some: Listed(tuple(some))
)
events = st.lists(st.one_of(listings, slices.map(Changed), st.sampled_from("abc").map(Deleted)), max_size=12)


@given(events, listings)
def test_a_listing_heals_whatever_was_missed(history: list[SliceEvent], listed: Listed) -> None:
    assert after(*history, listed) == after(listed)


@given(events)
def test_an_event_that_comes_twice_counts_once(history: list[SliceEvent]) -> None:
    twice = [event for event in history for _ in range(2)]
    assert after(*history) == after(*twice)


@given(events)
def test_what_is_used_is_somewhere_usable_and_nowhere_out(history: list[SliceEvent]) -> None:
    view = SliceView()
    for event in history:
        view = view.after(event)
    everywhere = [each for piece in view.slices.values() for each in piece.endpoints]
    out = {each.pod_uid for each in everywhere if not each.is_usable}
    usable = {each.pod_uid for each in everywhere if each.is_usable}
    assert {each.instance for each in view.endpoints("prompt")} == usable - out
