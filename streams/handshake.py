"""How two ends of a channel find out that they belong together: challenge and response over a shared key, then what they run.

No sockets here: frames in, frames out.

    connects                         listens
    Hello(nonce)            ->
                            <-       Hello(nonce)
    Proof(mac) + terms      ->                       checks the mac, keeps the terms
                            <-       Proof(mac) + terms
    both compare the terms; who listens may have several, told apart by fingerprint

Invariants:
1. A mac covers the prover's part (connects or listens), the version, both nonces and the prover's terms: it cannot be sent back to who
   made it, replayed on another connection, or put beside other terms.
2. Who listens shows nothing but a nonce before the other side proved the key; model and layers are not told to strangers.
3. Macs are compared in constant time. The key never travels. Without TLS a third party can still relay and change what follows.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from streams.errors import PeerLost, Reason, StreamError
from streams.frame import VERSION, Header, Hello, Proof

__all__ = ["TERMS_BYTES_MAX", "BadKey", "Handshake", "Terms", "read_key"]

TERMS_BYTES_MAX = 16384
_KEY_BYTES_MIN, _KEY_BYTES_MAX = 16, 4096


class BadKey(StreamError):
    """A key file that cannot be read, or holds no key."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both ends must agree on, and which stage this one is.

    Args:
        fingerprint: of the model; equal on both sides.
        layer_map: (first layer, layers) of every stage, in order; equal on both sides.
        stage: index of the own stage; differs between the sides.
    """

    fingerprint: Annotated[str, Meta(min_length=1, max_length=256)]
    layer_map: Annotated[tuple[tuple[int, int], ...], Meta(min_length=1, max_length=512)]
    stage: Annotated[int, Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.stage >= len(self.layer_map):
            raise ValueError(f"stage {self.stage} of {len(self.layer_map)}")


def read_key(path: Path) -> bytes:
    """The key in a file, without the white space around it.

    Raises: BadKey: one line that names the file and what is wrong.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_KEY_BYTES_MAX + 64).strip()
    except OSError as error:
        raise BadKey(f"the key file {path} cannot be read: {error.strerror or error}") from error
    if not _KEY_BYTES_MIN <= len(key) <= _KEY_BYTES_MAX:
        raise BadKey(
            f"the key file {path} holds {len(key)} bytes, not {_KEY_BYTES_MIN} to {_KEY_BYTES_MAX}: make one with `openssl rand -hex 32`"
        )
    return key


class Handshake:
    """One side of it. `done` once the other side proved the key and agrees; then `peer` and `seed` hold."""

    def __init__(self, key: bytes, terms: Terms, *, connects: bool, others: Sequence[Terms] = ()) -> None:
        """Args: others: terms of who listens beside `terms`, each of another fingerprint: the peer's says which of them counts."""
        assert len(key) >= _KEY_BYTES_MIN, f"a key of {len(key)} bytes; at least {_KEY_BYTES_MIN}"
        assert not (connects and others), "who connects says what it comes for"
        self.done = False
        self.peer: Terms | None = None
        self.seed = 0  # of later checksums
        self._key = key
        self._terms = terms
        self._others = others
        self._connects = connects
        self._nonce = secrets.token_bytes(32)
        self._theirs: bytes | None = None

    def begin(self) -> Hello:
        """The first frame, of either side."""
        return Hello(self._nonce)

    def take(self, header: Header, payload: bytes) -> tuple[Proof, bytes] | None:
        """A frame came; returns the frame that answers it and its payload, if one does. Once `peer` is known: send that, then `agree`.

        Raises: PeerLost.
        """
        if isinstance(header, Hello) and self._theirs is None:
            if hmac.compare_digest(header.nonce, self._nonce):
                raise PeerLost(Reason.UNAUTHENTICATED, "the peer sent our own challenge back")
            self._theirs = header.nonce
            return self._proof() if self._connects else None
        if isinstance(header, Proof) and self._theirs is not None and self.peer is None:
            if not hmac.compare_digest(header.mac, self._mac(not self._connects, payload)):
                raise PeerLost(Reason.UNAUTHENTICATED, "the peer did not prove that it has the key")
            self.peer = _terms(payload)
            if self._connects:
                return None
            wanted = self.peer.fingerprint
            self._terms = next((each for each in self._others if each.fingerprint == wanted), self._terms)
            return self._proof()
        raise PeerLost(Reason.UNAUTHENTICATED, f"a {type(header).__name__} came where the handshake has none")

    def agree(self) -> None:
        """Compare the terms, after the answer went out, so that both sides can say what differs. Raises PeerLost."""
        assert self.peer is not None, "nobody has proved anything yet"
        ours, theirs = self._terms, self.peer
        if ours.fingerprint != theirs.fingerprint:
            raise PeerLost(Reason.MISMATCH, f"the peer runs model {theirs.fingerprint}, we run {ours.fingerprint}")
        if ours.layer_map != theirs.layer_map:
            raise PeerLost(Reason.MISMATCH, f"the peer's layer map is {_shown(theirs)}, ours is {_shown(ours)}")
        if ours.stage == theirs.stage:
            raise PeerLost(Reason.MISMATCH, f"both sides are stage {ours.stage}")
        self.seed = int.from_bytes(self._keyed(b"frames", b"")[:8], "little")
        self.done = True

    def _proof(self) -> tuple[Proof, bytes]:
        payload = msgspec.msgpack.encode(self._terms)
        return Proof(self._mac(self._connects, payload)), payload

    def _mac(self, connects: bool, payload: bytes) -> bytes:
        return self._keyed(b"connects" if connects else b"listens", payload)

    def _keyed(self, purpose: bytes, payload: bytes) -> bytes:
        assert self._theirs is not None
        first, second = (self._nonce, self._theirs) if self._connects else (self._theirs, self._nonce)
        text = b"\0".join((b"forebay channel", purpose, bytes((VERSION,)), first, second, payload))
        return hmac.digest(self._key, text, hashlib.sha256)


def _terms(payload: bytes) -> Terms:
    try:
        return msgspec.msgpack.decode(payload, type=Terms)
    except msgspec.DecodeError as error:
        raise PeerLost(Reason.MALFORMED, f"terms that cannot be read: {error}") from error


def _shown(terms: Terms) -> str:
    parts = ", ".join(f"{first}+{layers}" for first, layers in terms.layer_map[:8])
    return f"[{parts}{', ...' if len(terms.layer_map) > 8 else ''}]"
