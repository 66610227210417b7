"""Frames of a channel as bytes: a head of 128 bytes, then a payload. Knows no sockets, no keys and nobody who waits.

Head: magic, version, header bytes, payload bytes, sequence, step, the payload's checksum; the header (msgpack, a tagged union of the
structs below: what is the same from step to step); zeros; a checksum of all that.

Invariants:
1. A reader believes nothing of a head before its checksum held; then magic, version, sequence, sizes and every field were checked.
2. A payload is as long as dtype and shape say, and no longer than the reader allows, before a byte of it is kept.
3. A frame counts once: sequences run from 0 without gaps. After the handshake checksums are seeded from it, so a frame recorded on another
   connection is damaged here. xxh3 is no signature: who can change bytes on the way is kept out by TLS.
4. A read takes what has come: several small frames at once, copied to where they belong (a copy of 12 KiB costs less than a system call).
   What of a payload has not come by then is read to its place, without a copy.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, NoReturn

import msgspec
import torch
import xxhash
from msgspec import Meta
from torch import Tensor

from streams.errors import PeerLost, Reason

__all__ = [
    "BYTES", "HEADER_BYTES_MAX", "HEAD_BYTES", "KIND_CHARS_MAX", "STEP_MAX", "VERSION", "Beat", "Bye", "Content", "FrameReader", "Grant",
    "Header", "Hello", "Proof", "Skip", "bytes_of", "cut", "dtype_name", "encoded", "head_of", "payload_bytes_of",
]  # fmt: skip

HEAD_BYTES = 128
VERSION = 2
KIND_CHARS_MAX = 16
BYTES = "bytes"  # the dtype of a message: bytes of any length
_MAGIC = b"FB"
HEADER_BYTES_MAX = 88
_FIELDS = struct.Struct(f"<2sBBIQQQ{HEADER_BYTES_MAX}s")  # as the head above; the payload's checksum is 0 where there is no payload
_SEAL = struct.Struct("<Q")
_SEALED_BYTES = HEAD_BYTES - _SEAL.size
_READ_BYTES = 65536  # at a time, but for the rest of a payload
_KNOWN_MAX = 256  # headers remembered
STEP_MAX = (1 << 63) - 1
_TEXT_BYTES_MAX = 64
_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_NAME_OF = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
_ITEM_BYTES_OF = {name: dtype.itemsize for dtype, name in _NAME_OF.items()} | {BYTES: 1}
_digest = xxhash.xxh3_64_intdigest
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE

Kind = Annotated[str, Meta(min_length=1, max_length=KIND_CHARS_MAX, pattern=r"\A[ -~]+\Z")]
Text = Annotated[str, Meta(max_length=_TEXT_BYTES_MAX)]
Receives = Annotated[int, Meta(ge=1, lt=1 << 32)]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=6)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h", forbid_unknown_fields=True):
    """The first frame of either side: its challenge."""

    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="p", forbid_unknown_fields=True):
    """The answer to a challenge; the payload says who we are and what we run, and is covered by it."""

    mac: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Content(msgspec.Struct, frozen=True, array_like=True, tag="d", forbid_unknown_fields=True):
    """A tensor, or a message of bytes, of the head's step; and, where it has room, what a `Grant` would say."""

    kind: Kind
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Shape
    grants: Annotated[tuple[tuple[Kind, Receives], ...], Meta(max_length=4)] = ()


class Skip(msgspec.Struct, frozen=True, array_like=True, tag="s", forbid_unknown_fields=True):
    """In place of the `Content` of the head's step that will not come, because what it waited for failed."""

    kind: Kind
    text: Text


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="g", forbid_unknown_fields=True):
    """So many more frames of a kind may be sent: their buffers are ready."""

    kind: Kind
    receives: Receives


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="b", forbid_unknown_fields=True):
    """I am alive, and have nothing to say."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="x", forbid_unknown_fields=True):
    """The last frame."""

    reason: Reason
    text: Text


Header = Hello | Proof | Content | Skip | Grant | Beat | Bye
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def cut(text: str) -> str:
    """`text` in one line of ASCII, short enough for a header."""
    return " ".join(text.encode("ascii", "replace").decode().split())[:_TEXT_BYTES_MAX]


def dtype_name(dtype: torch.dtype) -> str:
    """What a dtype is called in a header. Asserts that it can travel."""
    assert dtype in _NAME_OF, f"{dtype} does not travel: one of {', '.join(_ITEM_BYTES_OF)} does"
    return _NAME_OF[dtype]


def payload_bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; -1: there is no such dtype."""
    item = _ITEM_BYTES_OF.get(dtype)
    return -1 if item is None else item * math.prod(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, where they are. Asserts both. Whoever uses them holds the tensor."""
    assert tensor.is_cpu, f"a channel reads and writes host memory, not {tensor.device}: copy it there first"
    assert tensor.is_contiguous(), f"a channel takes contiguous tensors, not strides {tuple(tensor.stride())}"
    return _bytes_at(tensor.data_ptr(), tensor.nbytes)


@lru_cache(1024)  # steps use the same buffers over and over
def _bytes_at(address: int, length: int) -> memoryview:
    view: memoryview = _memory(address, length, _WRITABLE) if length else memoryview(b"")
    return view


def encoded(header: Header) -> bytes:
    """A header as bytes."""
    return _encoder.encode(header)


def head_of(header: Header | bytes, sequence: int, seed: int, step: int = 0, payload: memoryview | bytes = b"") -> bytes:
    """The 128 bytes of a head. `header`: itself, or `encoded`."""
    packed = header if isinstance(header, bytes) else _encoder.encode(header)
    assert len(packed) <= HEADER_BYTES_MAX, f"a header of {len(packed)} bytes does not fit a head: {header!r}"
    length = len(payload)
    sealed = _FIELDS.pack(_MAGIC, VERSION, len(packed), length, sequence, step, _digest(payload, seed) if length else 0, packed)
    return sealed + _SEAL.pack(_digest(sealed, seed))


class FrameReader:
    """Cuts what comes in into frames. Whoever reads fills `space()` and says how far; payloads go where `arrived` says.

    Args:
        arrived: told of each header, in order, with its step and the bytes that follow; returns where the payload goes, exactly as long,
            or None to read it and drop it.
        whole: told when the payload is there (at once where there is none) and its checksum held.
    Both may raise PeerLost, and so `advance` does.
    """

    def __init__(self, arrived: Callable[[Header, int, int], memoryview | None], whole: Callable[[], None]) -> None:
        self.payload_bytes_max = 0
        self.seed = 0
        self._arrived = arrived
        self._whole = whole
        self._sequence = 0
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._end = 0  # of what is in `_buffer`: less than a head, but while it is cut up
        self._target: memoryview | None = None  # where the rest of a payload goes; None: nowhere
        self._left = 0  # bytes of that rest
        self._checksum = 0  # that its head promised
        self._rest_of: tuple[Header, int] = (Beat(), 0)  # whose payload that is, and of which step
        self._sum: xxhash.xxh3_64 | None = None  # of what came of it; None: no payload is under way
        self._stopped = False
        self._known: dict[bytes, tuple[Header, int, int, bool]] = {}  # headers read before, see `_described`

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._sum is not None:
            return self._buffer[: self._left] if self._target is None else self._target[-self._left :]
        return self._buffer[self._end :] if self._end else self._buffer

    def inside(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._sum is not None or self._end > 0

    def stop(self) -> None:
        """Whatever else comes is dropped, and no place of a payload is written any more."""
        self._stopped = True
        self._target = self._sum = None
        self._end = 0

    def advance(self, filled: int) -> None:
        """`filled` bytes of `space()` were written. Raises PeerLost; the reader is then of no more use."""
        if self._stopped:
            return
        if self._sum is not None:
            self._take_rest(filled)
            return
        begin, end = 0, self._end + filled
        while end - begin >= HEAD_BYTES:
            begin = self._take(begin, end)
            if self._stopped:
                return
        left = end - begin
        if begin and left > 0:
            self._buffer[:left] = self._buffer[begin:end]
        self._end = max(left, 0)

    def _take(self, begin: int, end: int) -> int:
        """Read the frame at `begin`, or what has come of it; returns where it ends, which may be past `end`."""
        header, step, length, checksum = self._parsed(begin)
        target = self._arrived(header, step, length)
        begin += HEAD_BYTES
        if not length:
            self._whole()
            return begin
        assert target is None or len(target) == length, f"a place of another size was given for {length} bytes"
        piece = self._buffer[begin : min(begin + length, end)]
        if begin + length > end:
            self._begin_rest(header, step, length, checksum, target, piece)
            return begin + length
        if _digest(piece, self.seed) != checksum:
            _damaged(header, step)
        if target is not None:
            target[:] = piece
        self._whole()
        return begin + length

    def _begin_rest(
        self, header: Header, step: int, length: int, checksum: int, target: memoryview | None, piece: memoryview
    ) -> None:  # fmt: skip
        if target is not None:
            target[: len(piece)] = piece
        self._rest_of, self._target, self._left, self._checksum = (header, step), target, length - len(piece), checksum
        self._sum = xxhash.xxh3_64(piece, seed=self.seed)

    def _take_rest(self, filled: int) -> None:
        assert self._sum is not None
        self._sum.update(self.space()[:filled])
        self._left -= filled
        if not self._left:
            if self._sum.intdigest() != self._checksum:
                _damaged(*self._rest_of)
            self._target = self._sum = None
            self._whole()

    def _parsed(self, begin: int) -> tuple[Header, int, int, int]:
        """The header, step, payload bytes and checksum of the payload of the head at `begin`."""
        raw = self._buffer
        magic, version, header_bytes, length, sequence, step, checksum, padded = _FIELDS.unpack_from(raw, begin)
        if magic != _MAGIC:
            raise PeerLost(Reason.MALFORMED, f"a frame begins with {magic.hex()}, not with {_MAGIC.hex()}: no channel of ours")
        if version != VERSION:
            raise PeerLost(Reason.VERSION, f"the peer speaks version {version} of the protocol, we speak {VERSION}")
        sealed = begin + _SEALED_BYTES
        if _SEAL.unpack_from(raw, sealed)[0] != _digest(raw[begin:sealed], self.seed):
            raise PeerLost(Reason.DAMAGED, f"the checksum of head {self._sequence} differs")
        if sequence != self._sequence:
            raise PeerLost(Reason.OUT_OF_STEP, f"frame {sequence} came where frame {self._sequence} belongs")
        self._sequence += 1
        if length > self.payload_bytes_max:
            raise PeerLost(Reason.TOO_LARGE, f"a payload of {length} bytes; at most {self.payload_bytes_max} are taken")
        known = self._known.get(padded)
        header, its_bytes, its_length, stepped = self._described(padded, header_bytes) if known is None else known
        if header_bytes != its_bytes:
            _malformed(f"a header of {its_bytes} bytes said to have {header_bytes}")
        if length != its_length and its_length >= 0:
            _malformed(f"{length} bytes where {header!r} has {its_length}")
        if (step and not stepped) or step > STEP_MAX or (checksum and not length):
            _malformed(f"step {step} and checksum {checksum} behind {header!r}")
        return header, step, length, checksum

    def _described(self, padded: bytes, header_bytes: int) -> tuple[Header, int, int, bool]:
        """A header, its bytes, the bytes of its payload (-1: any), and whether its frame has a step. Raises PeerLost."""
        if header_bytes > HEADER_BYTES_MAX or padded[header_bytes:].strip(b"\0"):
            _malformed(f"a header of {header_bytes} bytes")
        try:
            header = _decoder.decode(padded[:header_bytes])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # bytes that a peer with the key sealed and we cannot read
            raise PeerLost(Reason.MALFORMED, f"a header that cannot be read: {error}") from error
        length = payload_bytes_of(header.dtype, header.shape) if isinstance(header, Content) else -1 if isinstance(header, Proof) else 0
        if length < 0 and isinstance(header, Content):
            _malformed(f"{header.dtype} {list(header.shape)}")
        found = header, header_bytes, length, isinstance(header, Content | Skip)
        if isinstance(header, Content | Grant):  # they come again and again
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[padded] = found
        return found


def _damaged(header: Header, step: int) -> NoReturn:
    called = f"{header.kind} of step {step}" if isinstance(header, Content) else f"a {type(header).__name__}"
    raise PeerLost(Reason.DAMAGED, f"the checksum of {called} differs")


def _malformed(what: str) -> NoReturn:
    raise PeerLost(Reason.MALFORMED, f"a frame with {what}")
