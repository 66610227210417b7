"""`Retention`: how long a session is kept after its last use.

Holds ages in seconds, and the file beside an archive that keeps one. Whoever has the sessions asks which of them are due.

Invariants:
1. A session that runs is never due, and its age counts from the end of its last turn.
2. An age of 0 is for ever. What a session was made with goes before the server's own.
"""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.archive.directory import said
from engine.protocol import SessionView

__all__ = ["Retention", "forget_age", "read_age", "write_age"]

_FILE: Final = "retention.json"
_BYTES_MAX: Final = 1000
_LOOK_S: Final = 60.0
_AT_REST: Final = ("new", "ready", "broken", "archived", "damaged")


class Retention:
    """One server's. Loop only."""

    def __init__(self, default_s: float, now: Callable[[], float] = time.time) -> None:
        """Args: default_s: for sessions that were made without an age of their own. now: Unix time."""
        self.default_s = default_s
        self.now = now
        self._given_s: dict[str, float] = {}
        self._ended: dict[str, float] = {}  # when the last turn of a session ended

    def give(self, session_id: str, seconds: float | None) -> None:
        """Args: seconds: None: the server's default, as from now on."""
        if seconds is not None:
            self._given_s[session_id] = seconds

    def given_s(self, session_id: str) -> float | None:
        """What it was made with; None: the server's default."""
        return self._given_s.get(session_id)

    def used(self, session_id: str) -> None:
        """A turn has ended."""
        self._ended[session_id] = self.now()

    def forget(self, session_id: str) -> None:
        """It is gone."""
        self._given_s.pop(session_id, None)
        self._ended.pop(session_id, None)

    def expires_at(self, session_id: str, used_at: float) -> float | None:
        """Unix time at which it is due; None: never."""
        seconds = self._given_s.get(session_id, self.default_s)
        return self.last_use(session_id, used_at) + seconds if seconds else None

    def last_use(self, session_id: str, used_at: float) -> float:
        """Unix time of the end of its last turn, if that was noted, or of what came later."""
        return max(used_at, self._ended.get(session_id, 0.0))

    def due(self, view: SessionView) -> bool:
        """Whether its time has come."""
        return view.phase in _AT_REST and self.due_at(view.id, view.used_at)

    def due_at(self, session_id: str, used_at: float) -> bool:
        """Whether the time of a session at rest has come."""
        at = self.expires_at(session_id, used_at)
        return at is not None and at <= self.now()

    @property
    def any_age(self) -> bool:
        """Whether anything is ever due."""
        return bool(self.default_s) or any(self._given_s.values())

    @property
    def look_again_s(self) -> float:
        """How soon somebody should look: a session outlives its age by at most a tenth of it, or a second."""
        ages = [seconds for seconds in (self.default_s, *self._given_s.values()) if seconds]
        return min(_LOOK_S, max(1.0, min(ages) / 10)) if ages else _LOOK_S


# Work: these touch files. Nothing that is read here is trusted further than for an age.


def write_age(place: Path, seconds: float | None) -> None:
    """Keep an age beside an archive, before the archive is written; None: the server's. Raises ArchiveFailed."""
    with said(str(place), "write"):
        if seconds is None:
            forget_age(place)
            return
        place.mkdir(mode=0o700, exist_ok=True)
        part = place / f"{_FILE}.part"
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as opened:
            json.dump({"ttl": seconds}, opened)
        os.replace(part, place / _FILE)


def read_age(place: Path) -> float | None:
    """What `write_age` kept; None where there is nothing that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        file = os.open(place / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file) as opened:
            seconds = float(json.loads(opened.read(_BYTES_MAX))["ttl"])
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    return None


def forget_age(place: Path) -> None:
    """Remove what `write_age` left. Raises OSError."""
    for name in (_FILE, f"{_FILE}.part"):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(place / name)
