"""The API keys that clients must know, from the configuration and from a file that may change while we run.

Keys are compared by their digests, all of them and in constant time, so that an answer's delay tells nothing.
"""

import hashlib
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from schemas.errors import Unauthenticated

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]
"""What changes with a file: time of modification, size, inode."""


class ApiKeys:
    """All valid keys. With neither keys nor a file everybody may come in; a file without keys lets nobody in."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        self._given = digests_of(keys)
        self._file = file
        self._stamp: Stamp | None = None
        self._from_file: tuple[bytes, ...] = ()

    def load(self) -> None:
        """Read the file; raises OSError. Later changes that cannot be read leave the keys as they are."""
        if self._file is not None:
            self._read(self._file)

    @property
    def is_required(self) -> bool:
        """Tell whether a client needs a key."""
        return bool(self._given) or self._file is not None

    def check(self, authorization: str | None, api_key: str | None) -> None:
        """Raise Unauthenticated unless a valid key is given: `Bearer KEY`, or KEY as Anthropic's clients send it."""
        if not self.is_required:
            return
        scheme, _, bearer = (authorization or "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else (api_key or "").strip()
        if not key:
            raise Unauthenticated("No API key was given. Send it as 'Authorization: Bearer KEY'.")
        if not self._knows(key):
            raise Unauthenticated("The API key is not valid here.")

    def _knows(self, key: str) -> bool:
        self._refresh()
        (digest,) = digests_of([key])
        matches = [hmac.compare_digest(digest, known) for known in (*self._given, *self._from_file)]
        return any(matches)

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            if stamp_of(self._file) != self._stamp:
                self._read(self._file)
                log.info("read the API keys again: %d", len(self._from_file))
        except (OSError, UnicodeDecodeError) as error:
            log.warning("the API keys cannot be read again: %s", error)

    def _read(self, file: Path) -> None:
        stamp = stamp_of(file)
        lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
        self._from_file = digests_of(line for line in lines if line and not line.startswith("#"))
        self._stamp = stamp


def digests_of(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Return the digests by which keys are compared."""
    return tuple(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest() for key in keys)


def stamp_of(file: Path) -> Stamp:
    """Return what tells one state of a file from another."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
