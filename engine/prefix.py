"""Which stored history begins like a prompt: hashes of pieces, each chained to the piece before.

Holds, for every history put in, its tokens and the hashes of its whole pieces. Knows no sessions and no memory: a history is any key.
Pieces are as long as a block first and then longer, so that a million tokens have two hundred: the loop waits for each.

Invariants:
1. A hash names everything before its piece too, the model, how rows are stored, and whose history it is: nothing is shared across names.
2. Hashes only find candidates; how much is common is decided by comparing tokens, so that no collision gives anybody wrong rows. All that
   share a hash have the same tokens up to there: a history whose piece is not the one that its hash stands for has no more hashes.
3. Costs: a pass over the prompt, and over the tokens that are new when a history grows; however many histories there are.
Source: design, sections 4 and 11.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy
import numpy.typing
import xxhash

from kernels.layout import BLOCK_ROWS

__all__ = ["Match", "PrefixIndex", "Tokens", "common_length"]

K = TypeVar("K")
Tokens = numpy.typing.NDArray[numpy.uint32]

# Tokens of a piece, and where such pieces end: what shares less than a block is not worth a fork.
_PIECES = ((BLOCK_ROWS, 4_096), (1_024, 65_536), (16_384, 1 << 62))
_COMPARED = 1 << 16  # tokens at a time: what comes behind a difference is not looked at


@dataclass(frozen=True, slots=True)
class Match(Generic[K]):
    """A history and how many of its first tokens are the prompt's first tokens, at least 1."""

    key: K
    tokens: int


class _Stored:
    """One history. `tokens` grows in place."""

    __slots__ = ("_room", "count", "hashes", "root", "stopped")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.hashes: list[bytes] = []  # of whole pieces, from the first on
        self.stopped = False  # another history has the next piece's hash and not its tokens
        self.count = 0
        self._room: Tokens = numpy.empty(0, dtype=numpy.uint32)

    @property
    def tokens(self) -> Tokens:
        return self._room[: self.count]

    def write(self, start: int, tokens: Tokens) -> None:
        """Have the first `start` tokens and then these."""
        end = start + len(tokens)
        if end > len(self._room):
            room = numpy.empty(max(end, 2 * start), dtype=numpy.uint32)
            room[:start] = self._room[:start]
            self._room = room
        self._room[start:end] = tokens
        self.count = end


def common_length(one: Tokens, other: Tokens, start: int = 0) -> int:
    """How many first tokens are the same. Both uint32 [n]. Args: start: so many are known to be."""
    length = min(len(one), len(other))
    for begin in range(start, length, _COMPARED):
        end = min(begin + _COMPARED, length)
        wrong = one[begin:end] != other[begin:end]
        if wrong.any():
            return begin + int(wrong.argmax())
    return length


class PrefixIndex(Generic[K]):
    """Histories by their first blocks. `K` is hashable."""

    def __init__(self, identity: bytes) -> None:
        """Args: identity: model and row formats; histories of another identity never match."""
        self._identity = identity
        self._stored_of: dict[K, _Stored] = {}
        self._keys_at: dict[bytes, dict[K, None]] = {}  # by hash, the root's included: who has that block behind those before

    def __len__(self) -> int:
        return len(self._stored_of)

    def __contains__(self, key: K) -> bool:
        return key in self._stored_of

    def put(self, key: K, tokens: Sequence[int], namespace: str, count: int | None = None) -> None:
        """Store or renew a history, whose rows are those of the first `count` of `tokens`, by default of all.

        Args: tokens: ids of 0 to 2^32 - 1; those that were put before under `key` are the same again, as far as both go.
            namespace: whose; the same at every put of `key`.
        """
        count = len(tokens) if count is None else count
        stored = self._stored_of.get(key)
        if stored is None:
            root = self._root(namespace)
            stored = self._stored_of[key] = _Stored(root)
            self._keys_at.setdefault(root, {})[key] = None
        assert stored.root == self._root(namespace), f"{key!r} changed its namespace"
        held = min(stored.count, count)
        assert not held or stored.tokens[held - 1] == tokens[held - 1], f"{key!r}: token {held - 1} is not the one put before"
        stored.write(held, _packed(tokens[held:count]))
        kept = _pieces_of(count)
        while len(stored.hashes) > kept:
            self._forget(stored.hashes.pop(), key)
            stored.stopped = False
        self._chain(key, stored, kept)

    def _chain(self, key: K, stored: _Stored, pieces: int) -> None:
        """Hash a history's pieces up to this number."""
        for number in range(len(stored.hashes), pieces if not stored.stopped else 0):
            first, end = _bounds(number)
            found = _chained(stored.hashes[-1] if stored.hashes else stored.root, stored.tokens[first:end])
            keys = self._keys_at.setdefault(found, {})
            if keys and not self._is_piece(keys, stored.tokens, first, end):
                stored.stopped = True
                return
            stored.hashes.append(found)
            keys[key] = None

    def _is_piece(self, keys: dict[K, None], tokens: Tokens, first: int, end: int) -> bool:
        """Whether tokens `first` to `end` - 1 are those of the histories that share a hash; those before are known to be."""
        return numpy.array_equal(self._stored_of[next(iter(keys))].tokens[first:end], tokens[first:end])

    def drop(self, key: K) -> None:
        """Forget a history; nothing if it is not stored."""
        stored = self._stored_of.pop(key, None)
        if stored is not None:
            for each in (stored.root, *stored.hashes):
                self._forget(each, key)

    def match(self, tokens: Sequence[int], namespace: str) -> list[Match[K]]:
        """Histories that share the most first blocks with `tokens`, by common tokens, the longest and then the newest first."""
        asked, last, known = _packed(tokens), self._root(namespace), 0
        keys = self._keys_at.get(last, {})
        for number in range(_pieces_of(len(asked))):
            first, end = _bounds(number)
            last = _chained(last, asked[first:end])
            deeper = self._keys_at.get(last)
            if deeper is None or not self._is_piece(deeper, asked, first, end):
                break
            keys, known = deeper, end
        found = [Match(key, common_length(self._stored_of[key].tokens, asked, known)) for key in reversed(keys)]
        return sorted((match for match in found if match.tokens), key=lambda match: -match.tokens)

    def _root(self, namespace: str) -> bytes:
        sized = len(self._identity).to_bytes(8, "little")  # no identity and namespace run into one another
        return xxhash.xxh3_128_digest(sized + self._identity + namespace.encode())

    def _forget(self, found: bytes, key: K) -> None:
        keys = self._keys_at[found]
        del keys[key]
        if not keys:
            del self._keys_at[found]

    def check_integrity(self) -> None:
        """Assert that every hash leads to the histories that have it, and to no other."""
        for key, stored in self._stored_of.items():
            assert stored.stopped or len(stored.hashes) == _pieces_of(stored.count), f"{key!r} has {len(stored.hashes)} hashes"
            assert all(key in self._keys_at[each] for each in (stored.root, *stored.hashes)), f"{key!r} is not found by its hashes"
        listed = sum(len(keys) for keys in self._keys_at.values())
        assert listed == sum(1 + len(set(stored.hashes)) for stored in self._stored_of.values()), "a hash leads to a history that left"


def _packed(tokens: Sequence[int]) -> Tokens:
    """Ids, for as long as nobody adds to an array: one is read as it lies. Of a list `array` takes a third of the time that numpy does."""
    held = tokens if isinstance(tokens, array) else array("I", tokens)
    assert held.itemsize == 4, f"ids of {held.itemsize} bytes"
    return numpy.frombuffer(held, dtype=numpy.uint32) if held else numpy.empty(0, dtype=numpy.uint32)


def _pieces_of(count: int) -> int:
    """Whole pieces that `count` tokens have."""
    number = start = 0
    for size, end in _PIECES:
        number += (min(count, end) - start) // size
        if count < end:
            break
        start = end
    return number


def _bounds(number: int) -> tuple[int, int]:
    """First token of a piece, and one past its last."""
    start = 0
    for size, end in _PIECES:
        first = start + number * size
        if first < end:
            return first, first + size
        number, start = number - (end - start) // size, end
    raise AssertionError("the last pieces have no end")


def _chained(before: bytes, piece: Tokens) -> bytes:
    """The same on every machine."""
    digest = xxhash.xxh3_128(before)
    digest.update(piece.astype("<u4", copy=False).data)
    return digest.digest()
