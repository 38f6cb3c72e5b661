"""Loads are those of open legs, and engines that have none are forgotten."""

from proxy.fleet import Engine
from proxy.loads import EngineLoads


def test_an_engine_without_legs_is_forgotten() -> None:
    loads, engine = EngineLoads(), Engine(url="http://a", role="normal")
    with loads.on(engine, 5):
        loads.add(engine, 2)
        assert dict(loads.num_queued_tokens) == {"http://a": 7}
    loads.take_off(engine, 2)
    assert dict(loads.num_queued_tokens) == {}
    loads.check_invariants()
