from collections import Counter
from dataclasses import replace

from proxy.fleet import Engine, FleetSnapshot
from proxy.pairing import (
    Knowledge,
    Pair,
    PairingRules,
    Route,
    Single,
    choose_route,
    explain_missing_route,
    max_model_len,
    max_pool_tokens,
    route_at,
)
from proxy.role_policies import Ask
from wire.services import EngineInfo, EngineRole


def engine(
    role: EngineRole, name: str, *, hash: str = "h", is_ready: bool = True, zone: str | None = None
) -> Engine:
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
        zone=zone,
        version="0",
    )
    return Engine(
        url=f"http://{name}", role=role, info=info, is_ready=is_ready, problem="" if is_ready else "busy"
    )


def names(fleet: FleetSnapshot, num_requests: int) -> list[tuple[str, ...]]:
    """The engines of successive requests."""
    routes = [route_at(fleet, turn) for turn in range(num_requests)]
    return [urls(route) for route in routes]


def urls(route: Route | None) -> tuple[str, ...]:
    assert route is not None
    return tuple(engine.url.removeprefix("http://") for engine in route.engines)


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


TWO_BY_TWO = fleet(
    *(engine("prompt", p) for p in ("p1", "p2")), *(engine("completion", d) for d in ("d1", "d2"))
)


def test_each_role_goes_to_where_its_prefix_is_cached() -> None:
    known = Knowledge(num_cached_tokens={"http://p2": 64, "http://d1": 32})
    ask = Ask(num_prompt_tokens=80)
    assert urls(choose_route(TWO_BY_TWO, ask, PairingRules(), known)) == ("p2", "d1")


def test_a_queue_longer_than_what_the_cache_saves_sends_the_prompt_elsewhere() -> None:
    known = Knowledge(num_queued_tokens={"http://p2": 70}, num_cached_tokens={"http://p2": 64})
    assert urls(choose_route(TWO_BY_TWO, Ask(num_prompt_tokens=80), PairingRules(), known))[0] == "p1"


def test_a_proxy_prefers_its_zone_and_pairs_within_it() -> None:
    zones = fleet(
        engine("prompt", "p-a", zone="a"),
        engine("prompt", "p-b", zone="b"),
        engine("completion", "d-a", zone="a"),
        engine("completion", "d-b", zone="b"),
    )
    assert {urls(choose_route(zones, Ask(turn=turn), PairingRules(zone="b"))) for turn in range(4)} == {
        ("p-b", "d-b")
    }
    assert {urls(choose_route(zones, Ask(turn=turn), PairingRules())) for turn in range(4)} == {
        ("p-a", "d-a"),
        ("p-b", "d-b"),
    }
    assert urls(choose_route(zones, Ask(), PairingRules(zone="c"))) == ("p-a", "d-a")


def test_short_and_mostly_cached_prompts_go_to_a_normal_engine() -> None:
    both, rules = fleet(*TWO_BY_TWO.engines, engine("normal", "n")), PairingRules(normal_max_new_tokens=16)
    assert urls(choose_route(both, Ask(num_prompt_tokens=16), rules)) == ("n",)
    assert len(urls(choose_route(both, Ask(num_prompt_tokens=17), rules))) == 2
    known = Knowledge(num_cached_tokens={"http://n": 64})
    assert urls(choose_route(both, Ask(num_prompt_tokens=80), rules, known)) == ("n",)
    assert len(urls(choose_route(both, Ask(num_prompt_tokens=1), PairingRules()))) == 2


def test_the_completion_engine_with_most_of_the_prompt_lends_it_to_the_prompt_engine() -> None:
    """Whichever completion engine serves the request: an earlier turn may have been decoded elsewhere."""
    all_engines = fleet(
        engine("prompt", "p"),
        engine("completion", "c0"),
        engine("completion", "c1"),
        engine("completion", "x", hash="y"),
    )
    known = {"http://p": 8, "http://c0": 12, "http://c1": 16, "http://x": 100}
    assert lender(all_engines, known) == "http://c1"


def test_nobody_lends_what_the_prompt_engine_has_itself() -> None:
    all_engines = fleet(engine("prompt", "p"), engine("completion", "c"))
    assert lender(all_engines, {"http://p": 8, "http://c": 8}) is None
    assert lender(all_engines, {}) is None


def test_an_engine_without_an_address_for_others_lends_nothing() -> None:
    silent = engine("completion", "c")
    assert silent.info is not None
    silent = replace(silent, info=replace(silent.info, control_address=None))
    assert lender(fleet(engine("prompt", "p"), silent), {"http://c": 16}) is None


def lender(engines: FleetSnapshot, num_cached_tokens: dict[str, int]) -> str | None:
    known = Knowledge(num_cached_tokens=num_cached_tokens)
    route = choose_route(engines, Ask(turn=0), PairingRules(), known)
    assert isinstance(route, Pair)
    return None if route.lender is None else route.lender.url
