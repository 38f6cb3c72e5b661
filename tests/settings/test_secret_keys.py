"""Keys from a variable and a file that changes while it is in use."""

import logging
import os
from pathlib import Path

import pytest

from settings.secret_keys import CHECK_INTERVAL_S, SecretKeys, SecretKeysError, bearer_token


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_interval(self) -> None:
        self.now_s += CHECK_INTERVAL_S


def test_any_of_several_keys_is_good(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta \n")
    keys = SecretKeys(["gamma"], file)
    assert [keys.accept(key) for key in ("alpha", "beta", "gamma")] == [True] * 3
    assert not any(keys.accept(key) for key in ("", "alph", "alphaa", "# ours", "ALPHA", "ключ", "\ud800"))
    assert keys.first() == "alpha"


def test_without_keys_none_is_required() -> None:
    assert not SecretKeys([""]).is_required
    assert SecretKeys(["a"]).is_required


def test_a_changed_file_counts_after_the_interval(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("old\n")
    keys = SecretKeys(file=file, clock=clock)
    fresh = tmp_path / "fresh"
    fresh.write_text("new\n")
    os.replace(fresh, file)  # as secrets of a cluster change: another inode, perhaps the same size and time
    assert keys.accept("old"), "not looked at yet"
    clock.pass_interval()
    assert (keys.accept("old"), keys.accept("new"), keys.first()) == (False, True, "new")


@pytest.mark.parametrize("broken", ["gone", "empty"])
def test_a_file_that_breaks_later_leaves_the_keys_as_they_were(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("key\n")
    keys = SecretKeys(file=file, clock=clock)
    file.unlink() if broken == "gone" else file.write_text("\n")
    clock.pass_interval()
    with caplog.at_level(logging.WARNING):
        assert keys.accept("key")
    assert "stay good" in caplog.text
    file.write_text("other\n")
    clock.pass_interval()
    assert (keys.accept("key"), keys.accept("other")) == (False, True)


@pytest.mark.parametrize("content", [None, "", "# nothing\n", b"\xff\xfe"])
def test_a_file_that_is_no_good_at_the_start_stops_it(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SecretKeysError, match=str(file)):
        SecretKeys(file=file)


def test_only_bearer_headers_are_keys() -> None:
    assert bearer_token([(b"authorization", b"Bearer k 1")]) == "k 1"
    assert bearer_token([(b"authorization", b"bearer k")]) == "k"
    assert bearer_token([(b"authorization", b"Basic k")]) is None
    assert bearer_token([(b"x-api-key", b"k")]) is None
