from collections import Counter
from dataclasses import replace

from proxy.engines import Engine, FleetSnapshot
from proxy.pairing import (
    Pair,
    RoundRobin,
    Single,
    explain_missing_route,
    max_model_len,
    max_pool_tokens,
    route_at,
)
from wire.services import EngineInfo, EngineRole


def engine(role: EngineRole, name: str, *, hash: str = "h", is_ready: bool = True) -> Engine:
    info = EngineInfo(
        role=role,
        engine_id=name,
        epoch=1,
        model="tiny",
        compatibility_hash=hash,
        compatibility={"dtype": hash, "block_size": "4"},
        control_address="tcp://127.0.0.1:9",
        max_model_len=100,
        max_num_seqs=8,
        block_size=4,
        num_usable_blocks=20,
        num_free_blocks=20,
        version="0",
    )
    return Engine(
        url=f"http://{name}", role=role, info=info, is_ready=is_ready, problem="" if is_ready else "busy"
    )


def names(fleet: FleetSnapshot, num_requests: int) -> list[tuple[str, ...]]:
    """The engines of successive requests."""
    policy, routes = RoundRobin(), []
    for _ in range(num_requests):
        route = policy.choose(fleet)
        assert route is not None
        routes.append(tuple(engine.url.removeprefix("http://") for engine in route.engines))
    return routes


def fleet(*engines: Engine) -> FleetSnapshot:
    return FleetSnapshot(engines)


def test_every_pair_gets_its_turn() -> None:
    two_by_two = fleet(
        *(engine("prompt", p) for p in ("p1", "p2")), *(engine("completion", d) for d in ("d1", "d2"))
    )
    assert Counter(names(two_by_two, 8)) == {
        ("p1", "d1"): 2, ("p1", "d2"): 2, ("p2", "d1"): 2, ("p2", "d2"): 2,
    }  # fmt: skip


def test_only_engines_of_equal_compatibility_are_paired() -> None:
    mixed = fleet(
        engine("prompt", "p-old", hash="old"),
        engine("prompt", "p-new", hash="new"),
        engine("prompt", "p-lonely", hash="other"),
        engine("completion", "d-old", hash="old"),
        engine("completion", "d-new", hash="new"),
    )
    assert set(names(mixed, 6)) == {("p-old", "d-old"), ("p-new", "d-new")}


def test_engines_that_are_not_ready_get_nothing() -> None:
    loading = engine("completion", "x", is_ready=False)
    assert names(fleet(engine("prompt", "p"), loading, engine("completion", "d")), 3) == [("p", "d")] * 3


def test_normal_engines_serve_where_no_pair_is_left() -> None:
    normal, prompt = engine("normal", "n"), engine("prompt", "p")
    assert isinstance(route_at(fleet(normal, prompt, engine("completion", "d")), 0), Pair)
    assert route_at(fleet(normal, prompt), 0) == Single(normal)


def test_no_route_without_a_completion_engine() -> None:
    assert route_at(fleet(engine("prompt", "p")), 0) is None


def test_the_reason_for_no_route_is_told() -> None:
    assert "--prompt-url" in explain_missing_route(fleet())
    assert explain_missing_route(fleet(engine("prompt", "p"), engine("completion", "d", is_ready=False))) == (
        "completion http://d: busy"
    )
    assert explain_missing_route(
        fleet(engine("prompt", "p", hash="a"), engine("completion", "d", hash="b"))
    ) == ("no prompt engine fits a completion engine: dtype is a and b")
    assert "both" not in explain_missing_route(fleet(engine("prompt", "p")))


def test_limits_are_those_of_the_smaller_engine_and_of_the_decoding_pool() -> None:
    prompt, completion = engine("prompt", "p"), engine("completion", "d")
    assert prompt.info is not None
    short = replace(prompt, info=replace(prompt.info, max_model_len=50, num_usable_blocks=1))
    assert max_model_len(Pair(short, completion)) == 50
    assert max_pool_tokens(Pair(short, completion)) == 80
