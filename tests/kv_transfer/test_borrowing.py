"""Cached blocks that are lent: asked for by their tokens, then a hand-over like any other."""

import numpy as np
import pytest

from kv_transfer.events import Arrived, Asked, Failed, Offered, Reclaimable, Released
from kv_transfer.messages import Prefix
from kv_transfer.offers import Offer
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.builders import Pair

TOKENS = np.arange(100, 116, dtype=np.int32)
LEASE_S = TransferSettings().lease_s


def prefix(first_token: int = 4, tokens: bytes | None = None) -> Prefix:
    return Prefix(TOKENS.tobytes() if tokens is None else tokens, first_token, "salt")


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.reader.request(prefix=prefix())
    pair.run()
    return pair


def test_the_engine_is_asked_by_tokens_and_lends_what_it_has(pair: Pair) -> None:
    (asked,) = pair.take_events()
    assert isinstance(asked, Asked)
    assert (asked.handover_id, asked.first_token, asked.cache_salt) == ("h", 4, "salt")
    assert np.array_equal(asked.token_ids, TOKENS)
    pair.offer(Offer("h", 8, (3, 5), None, ()))
    pair.run()
    assert pair.reader.take_events() == [Offered("h", 8, 2)]
    pair.reader.pull((7, 8))
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", ())]
    assert pair.take_events() == [Released("h", "released")]
    assert pair.reader.pool.holds((7, 8), (3, 5))


def test_a_reader_is_turned_away_where_nothing_is_cached(pair: Pair) -> None:
    pair.withdraw()
    pair.run()
    (failed,) = pair.reader.take_events()
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.blocks_safe) == ("withdrawn", True)


def test_the_engine_is_asked_once_however_long_the_reader_waits(pair: Pair) -> None:
    pair.advance(3 * LEASE_S)
    assert len(pair.take_events()) == 1


def test_a_reader_that_gave_up_before_the_answer_gets_nothing_pinned(pair: Pair) -> None:
    pair.take_events()
    pair.reader.abandon()
    pair.run()
    pair.offer(Offer("h", 8, (3, 5), None, ()))
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.take_events() == [Released("h", "abandoned")]


def test_a_reader_that_dies_keeps_a_loan_for_one_lease(pair: Pair) -> None:
    pair.take_events()
    pair.offer(Offer("h", 8, (3, 5), None, ()))
    pair.reader.to_source.cut = True
    pair.advance(LEASE_S + 0.1)
    assert pair.take_events() == [Released("h", "expired")]


@pytest.mark.parametrize("wrong", [prefix(tokens=b"123"), prefix(first_token=17)])
def test_a_prefix_that_cannot_be_is_ignored(wrong: Prefix) -> None:
    pair = Pair()
    pair.reader.request(prefix=wrong)
    pair.run()
    assert pair.take_events() == []
    assert pair.source.counters.ignored == {"invalid": 1}
