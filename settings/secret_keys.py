"""Keys from a variable and a file: compared in constant time, read again when the file changes."""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import SecretStr

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""A changed file is noticed after this time at the latest."""

Stamp = tuple[int, int, int]


class SecretKeysError(Exception):
    """The file cannot be read, or has no key in it."""


class SecretKeys:
    """Any of several keys is good, so that one can be replaced without a moment in which none is.

    A file has one key a line; empty lines and those that begin with `#` are skipped. Should it vanish or
    become empty later, the keys it had stay good, and a warning is logged.
    """

    def __init__(
        self, given: Iterable[str] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises `SecretKeysError` where the file is not good now."""
        self._given = tuple(key for key in given if key)
        self._file = file
        self.is_required = bool(self._given) or file is not None
        self._clock = clock
        self._stamp: Stamp | None = None
        self._from_file: tuple[str, ...] = ()
        if file is not None:
            self._from_file = self._read(file)
        self._hash()
        self._next_check_s = clock() + CHECK_INTERVAL_S

    def first(self) -> str | None:
        """The key to show to others: the file's first, else the first one given."""
        self._reload_if_changed()
        return next(iter((*self._from_file, *self._given)), None)

    def accept(self, key: str) -> bool:
        """Takes as long for a key that is almost right as for any other."""
        self._reload_if_changed()
        digest = _digest(key)
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(known, digest)
        return is_known

    def _reload_if_changed(self) -> None:
        now_s = self._clock()
        if self._file is None or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        try:
            if _stamp(self._file) == self._stamp:
                return
            self._from_file = self._read(self._file)
        except (OSError, SecretKeysError) as error:
            logger.warning("the keys of before stay good: %s", error)
            return
        self._hash()
        logger.info("%s has changed: %d keys", self._file, len(self._from_file))

    def _read(self, file: Path) -> tuple[str, ...]:
        try:
            self._stamp = _stamp(file)
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SecretKeysError(f"the key file {file} cannot be read: {error}") from None
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise SecretKeysError(f"the key file {file} has no key in it")
        return keys

    def _hash(self) -> None:
        self._digests = [_digest(key) for key in (*self._given, *self._from_file)]


def secret_keys(given: SecretStr | None, file: Path | None) -> SecretKeys:
    """From the fields of a settings class; `given` may have several, separated by commas."""
    text = "" if given is None else given.get_secret_value()
    return SecretKeys([key.strip() for key in text.split(",")], file)


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What follows `Bearer` in the `authorization` header of an ASGI scope; None where there is none."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
