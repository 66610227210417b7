"""One line of the doctor: what a setting of the host is now, whether that is good, and how to see, set and restore it."""

from dataclasses import dataclass
from typing import Literal

from engine.doctor.tree import Unread

__all__ = ["NOTHING_TO_RESTORE", "NOTHING_TO_SET", "Finding", "State", "unread"]

State = Literal["good", "bad", "unknown"]
NOTHING_TO_SET = "nothing to set"
NOTHING_TO_RESTORE = "nothing to restore"


@dataclass(frozen=True, slots=True)
class Finding:
    """`see`, `set_it` and `restore` are commands or instructions for a person; the doctor runs none of them."""

    name: str
    now: str
    state: State
    why: str  # what the value does to decoding
    see: str
    set_it: str = NOTHING_TO_SET
    restore: str = NOTHING_TO_RESTORE


def unread(name: str, found: Unread, why: str, see: str) -> Finding:
    """A setting whose file could not be read."""
    return Finding(name, f"{found.path}: {found.why}", "unknown", why, see)
