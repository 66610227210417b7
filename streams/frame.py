"""Frames of a channel as bytes: a head of 128 bytes, then a payload. Knows no sockets, no keys and nobody who waits.

Head: magic, version, header bytes, payload bytes, sequence; the header (msgpack, a tagged union of the structs below); zeros; a checksum of
all that. A head of fixed size is read in one call, and the next call reads the payload to where it belongs, without a copy.

Invariants:
1. A reader believes nothing of a head before its checksum held; then magic, version, sequence, sizes and every field were checked.
2. A payload is as long as dtype and shape say, and no longer than the reader allows, before a byte of it is read.
3. A frame counts once: sequences run from 0 without gaps. After the handshake checksums are seeded from it, so a frame recorded on another
   connection is damaged here. xxh3 is no signature: who can change bytes on the way is kept out by TLS.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import msgspec
import torch
import xxhash
from msgspec import Meta
from torch import Tensor

from streams.errors import PeerLost, Reason

__all__ = [
    "BYTES", "HEAD_BYTES", "KIND_CHARS_MAX", "VERSION", "Beat", "Bye", "Content", "FrameReader", "Grant", "Head", "Header", "Hello",
    "Proof", "Skip", "bytes_of", "cut", "dtype_name", "head_of", "payload_bytes_of", "payload_checksum",
]  # fmt: skip

HEAD_BYTES = 128
VERSION = 1
KIND_CHARS_MAX = 16
BYTES = "bytes"  # the dtype of a message: bytes of any length
_MAGIC = b"FB"
_PREFIX = struct.Struct("<2sBBQQ")  # magic, version, header bytes, payload bytes, sequence
_CHECKSUM = struct.Struct("<Q")
_SEALED_BYTES = HEAD_BYTES - _CHECKSUM.size
_SINK_BYTES = 65536  # what nobody wants any more is read into here
_TEXT_BYTES_MAX = 70
_DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_NAME_OF = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
_ITEM_BYTES_OF = {name: dtype.itemsize for dtype, name in _NAME_OF.items()} | {BYTES: 1}

Kind = Annotated[str, Meta(min_length=1, max_length=KIND_CHARS_MAX, pattern=r"\A[ -~]+\Z")]
Text = Annotated[str, Meta(max_length=_TEXT_BYTES_MAX)]
Step = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=6)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h", forbid_unknown_fields=True):
    """The first frame of either side: its challenge."""

    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="p", forbid_unknown_fields=True):
    """The answer to a challenge; the payload says who we are and what we run, and is covered by it."""

    mac: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Content(msgspec.Struct, frozen=True, array_like=True, tag="d", forbid_unknown_fields=True):
    """A tensor, or a message of bytes."""

    kind: Kind
    step: Step
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Shape
    checksum: Annotated[int, Meta(ge=0)]


class Skip(msgspec.Struct, frozen=True, array_like=True, tag="s", forbid_unknown_fields=True):
    """In place of a `Content` that will not come, because what it waited for failed."""

    kind: Kind
    step: Step
    text: Text


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="g", forbid_unknown_fields=True):
    """So many more frames of a kind may be sent: their buffers are ready."""

    kind: Kind
    receives: Annotated[int, Meta(ge=1, lt=1 << 32)]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="b", forbid_unknown_fields=True):
    """I am alive, and have nothing to say."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="x", forbid_unknown_fields=True):
    """The last frame."""

    reason: Reason
    text: Text


Header = Hello | Proof | Content | Skip | Grant | Beat | Bye
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


class Head(msgspec.Struct, frozen=True):
    """A head as it was read: its header, and the bytes that follow."""

    header: Header
    payload_bytes: int


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
    """The bytes of a contiguous tensor in host memory, where they are. Asserts both."""
    assert tensor.is_cpu, f"a channel reads and writes host memory, not {tensor.device}: copy it there first"
    assert tensor.is_contiguous(), f"a channel takes contiguous tensors, not strides {tuple(tensor.stride())}"
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach() if tensor.requires_grad else tensor
    view: memoryview = (flat if flat.dim() else flat.view(1)).view(torch.uint8).numpy().data
    return view.cast("B")


def payload_checksum(payload: memoryview, seed: int) -> int:
    """The checksum that a `Content` carries."""
    return xxhash.xxh3_64_intdigest(payload, seed=seed)


def head_of(header: Header, sequence: int, payload_bytes: int, seed: int) -> bytes:
    """The 128 bytes of a head."""
    encoded = _encoder.encode(header)
    sealed = (_PREFIX.pack(_MAGIC, VERSION, len(encoded), payload_bytes, sequence) + encoded).ljust(_SEALED_BYTES, b"\0")
    assert len(sealed) == _SEALED_BYTES, f"a header of {len(encoded)} bytes does not fit a head: {header}"
    return sealed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(sealed, seed=seed))


class FrameReader:
    """Cuts what comes in into frames. Whoever reads fills `space()` and says how far; payloads go where `arrived` says.

    Args:
        arrived: told of each head, in order; returns where the payload goes, exactly as long, or None to read it and drop it.
        whole: told when the payload is there (at once where there is none), with its checksum.
    Both may raise PeerLost, and so `advance` does.
    """

    def __init__(self, arrived: Callable[[Head], memoryview | None], whole: Callable[[int], None]) -> None:
        self.payload_bytes_max = 0
        self.seed = 0
        self._arrived = arrived
        self._whole = whole
        self._sequence = 0
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._sink: memoryview | None = None
        self._target = self._head
        self._filled = 0
        self._left = 0  # bytes of the payload that `_target` does not hold
        self._sum: xxhash.xxh3_64 | None = None  # None: in a head

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._target[self._filled :] if self._filled else self._target

    def inside(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._sum is not None or self._filled > 0

    def advance(self, filled: int) -> None:
        """`filled` bytes of `space()` were written. Raises PeerLost; the reader is then of no more use."""
        begun, self._filled = self._filled, self._filled + filled
        if self._sum is None:
            if self._filled == HEAD_BYTES:
                self._read_head()
            return
        self._sum.update(self._target[begun : self._filled])
        if self._filled == len(self._target):
            self._next_piece()

    def _read_head(self) -> None:
        head = self._parsed()
        self._filled = 0
        self._sum = xxhash.xxh3_64(seed=self.seed)
        target = self._arrived(head)
        if target is None:
            self._left, self._target = head.payload_bytes, self._head[:0]
        else:
            assert len(target) == head.payload_bytes, f"{len(target)} bytes were given for {head.payload_bytes}"
            self._left, self._target = 0, target
        if not len(self._target):
            self._next_piece()

    def _next_piece(self) -> None:
        """Go on with the sink while bytes are left that nobody wants, else end the frame."""
        self._filled = 0
        if self._left:
            self._sink = self._sink or memoryview(bytearray(_SINK_BYTES))
            self._target = self._sink[: min(self._left, _SINK_BYTES)]
            self._left -= len(self._target)
            return
        assert self._sum is not None
        checksum = self._sum.intdigest()
        self._target, self._sum = self._head, None
        self._whole(checksum)

    def _parsed(self) -> Head:
        raw = self._head
        magic, version, header_bytes, payload_bytes, sequence = _PREFIX.unpack_from(raw)
        if magic != _MAGIC:
            raise PeerLost(Reason.MALFORMED, f"a frame begins with {bytes(magic).hex()}, not with {_MAGIC.hex()}: no channel of ours")
        if version != VERSION:
            raise PeerLost(Reason.VERSION, f"the peer speaks version {version} of the protocol, we speak {VERSION}")
        if _CHECKSUM.unpack_from(raw, _SEALED_BYTES)[0] != xxhash.xxh3_64_intdigest(raw[:_SEALED_BYTES], seed=self.seed):
            raise PeerLost(Reason.DAMAGED, f"the checksum of head {self._sequence} differs")
        if sequence != self._sequence:
            raise PeerLost(Reason.OUT_OF_STEP, f"frame {sequence} came where frame {self._sequence} belongs")
        self._sequence += 1
        if payload_bytes > self.payload_bytes_max:
            raise PeerLost(Reason.TOO_LARGE, f"a payload of {payload_bytes} bytes; at most {self.payload_bytes_max} are taken")
        if header_bytes > _SEALED_BYTES - _PREFIX.size:
            _malformed(f"a header of {header_bytes} bytes")
        try:
            header = _decoder.decode(raw[_PREFIX.size : _PREFIX.size + header_bytes])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # bytes that a peer with the key sealed and we cannot read
            raise PeerLost(Reason.MALFORMED, f"a header that cannot be read: {error}") from error
        if isinstance(header, Content):
            expected = payload_bytes_of(header.dtype, header.shape)
            if expected != payload_bytes:
                _malformed(f"{payload_bytes} bytes for {header.dtype} {list(header.shape)}")
        elif payload_bytes and not isinstance(header, Proof):
            _malformed(f"{payload_bytes} bytes behind a frame that has none")
        return Head(header, payload_bytes)


def _malformed(what: str) -> NoReturn:
    raise PeerLost(Reason.MALFORMED, f"a frame with {what}")
