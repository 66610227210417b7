"""Which stored history begins like a prompt: hashes of 64-token blocks, each chained to the block before.

Holds, for every history put in, its tokens and the hashes of its full blocks. Knows no sessions and no memory: a history is any key.

Invariants:
1. A hash names everything before its block too, the model, how rows are stored, and whose history it is: nothing is shared across names.
2. Hashes only find candidates; how much is common is decided by comparing tokens, so that no collision gives anybody wrong rows.
3. Costs: a pass over the prompt, and over the tokens that are new when a history grows.
Source: design, sections 4 and 11.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy
import numpy.typing
import xxhash

from kernels.layout import BLOCK_ROWS

__all__ = ["Match", "PrefixIndex", "Tokens", "common_length"]

K = TypeVar("K")
Tokens = numpy.typing.NDArray[numpy.uint32]


@dataclass(frozen=True, slots=True)
class Match(Generic[K]):
    """A history and how many of its first tokens are the prompt's first tokens, at least 1."""

    key: K
    tokens: int


@dataclass(slots=True)
class _Stored:
    root: bytes
    tokens: Tokens
    hashes: list[bytes] = field(default_factory=list)  # of full blocks


def common_length(one: Tokens, other: Tokens) -> int:
    """How many first tokens are the same. Both uint32 [n]."""
    length = min(len(one), len(other))
    wrong = numpy.flatnonzero(one[:length] != other[:length])
    return int(wrong[0]) if len(wrong) else length


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

    def put(self, key: K, tokens: Sequence[int], namespace: str) -> None:
        """Store or renew a history, whose rows are those of `tokens`.

        Args: tokens: ids of 0 to 2^32 - 1; those that were put before under `key` are the same again, as far as both go.
            namespace: whose; the same at every put of `key`.
        """
        stored = self._stored_of.get(key)
        if stored is None:
            root = self._root(namespace)
            stored = self._stored_of[key] = _Stored(root, numpy.zeros(0, dtype=numpy.uint32))
            self._keys_at.setdefault(root, {})[key] = None
        assert stored.root == self._root(namespace), f"{key!r} changed its namespace"
        held = min(len(stored.tokens), len(tokens))
        assert not held or stored.tokens[held - 1] == tokens[held - 1], f"{key!r}: token {held - 1} is not the one put before"
        stored.tokens = numpy.concatenate([stored.tokens[:held], _packed(tokens[held:])])
        while len(stored.hashes) > len(tokens) // BLOCK_ROWS:
            self._forget(stored.hashes.pop(), key)
        first = len(stored.hashes)
        for piece in _pieces(stored.tokens[BLOCK_ROWS * first :]):
            found = _chained(stored.hashes[-1] if stored.hashes else stored.root, piece)
            stored.hashes.append(found)
            self._keys_at.setdefault(found, {})[key] = None

    def drop(self, key: K) -> None:
        """Forget a history; nothing if it is not stored."""
        stored = self._stored_of.pop(key, None)
        if stored is not None:
            for each in (stored.root, *stored.hashes):
                self._forget(each, key)

    def match(self, tokens: Sequence[int], namespace: str) -> list[Match[K]]:
        """Histories that share the most first blocks with `tokens`, by common tokens, the longest and then the newest first."""
        asked = _packed(tokens)
        keys = self._keys_at.get(self._root(namespace), {})
        last = self._root(namespace)
        for piece in _pieces(asked):
            last = _chained(last, piece)
            deeper = self._keys_at.get(last)
            if deeper is None:
                break
            keys = deeper
        found = [Match(key, common_length(self._stored_of[key].tokens, asked)) for key in reversed(keys)]
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
            assert len(stored.hashes) == len(stored.tokens) // BLOCK_ROWS, f"{key!r} has {len(stored.hashes)} hashes"
            assert all(key in self._keys_at[each] for each in (stored.root, *stored.hashes)), f"{key!r} is not found by its hashes"
        listed = sum(len(keys) for keys in self._keys_at.values())
        assert listed == sum(1 + len(set(stored.hashes)) for stored in self._stored_of.values()), "a hash leads to a history that left"


def _packed(tokens: Sequence[int]) -> Tokens:
    """Ids as an array; a third of the time that numpy takes for a list, and the loop waits for it."""
    return numpy.frombuffer(array("I", tokens), dtype=numpy.uint32)


def _pieces(tokens: Tokens) -> Iterator[bytes]:
    """The bytes of each full block, the same on every machine."""
    whole = tokens.astype("<u4", copy=False).tobytes()
    size = 4 * BLOCK_ROWS
    return (whole[start : start + size] for start in range(0, len(tokens) // BLOCK_ROWS * size, size))


def _chained(before: bytes, piece: bytes) -> bytes:
    return xxhash.xxh3_128_digest(before + piece)
