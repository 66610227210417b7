"""Text to token ids, and token ids to bytes.

Holds a checkpoint's `tokenizer.json`, read once. Knows no chat format (`template.py`) and no streams of text (`detokenizer.py`).

1. Special tokens written in a text become their ids; none are added that the text does not hold (the chat template supplies them).
2. Only byte-level tokenizers are accepted: then a text is the concatenation of its tokens' bytes, which incremental decoding relies on.
3. A directory without `tokenizer.json` gives an absent tokenizer: token-id prompts work, tokens have no bytes, and `encode` refuses.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import tokenizers

from engine.errors import BadModel, BadRequest

__all__ = ["FILE_NAME", "Tokenizer"]

FILE_NAME = "tokenizer.json"
_LONG_TEXT = 32_768  # characters; shorter texts take under about 25 ms on one core


def _byte_of() -> dict[str, int]:
    """GPT-2's table of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in plain]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


_BYTE_OF = _byte_of()


class Tokenizer:
    """One checkpoint's tokenizer. Build with `load`; call `aclose` when done."""

    def __init__(self, source: bytes | None) -> None:
        """Args: source: contents of tokenizer.json; None: absent. Raises: BadModel: not a byte-level tokenizer."""
        self._inner = None if source is None else _parse(source)
        self._hash = hashlib.sha256(source or b"").hexdigest()
        added = {} if self._inner is None else self._inner.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_of: dict[int, bytes] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._closed = False

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `tokenizer.json`. Raises: BadModel: it is there but cannot be used."""
        path = directory / FILE_NAME
        try:
            return cls(path.read_bytes() if path.exists() else None)
        except OSError as error:
            raise BadModel(f"{FILE_NAME} cannot be read: {error.strerror}") from error

    @property
    def available(self) -> bool:
        """Whether there is a tokenizer."""
        return self._inner is not None

    @property
    def vocabulary(self) -> int:
        """Token ids it knows, added ones included; 0 if absent. The model's vocabulary may be larger."""
        return 0 if self._inner is None else int(self._inner.get_vocab_size(with_added_tokens=True))

    def hash(self) -> str:
        """SHA-256 of tokenizer.json in hexadecimal."""
        return self._hash

    def encode(self, text: str) -> list[int]:
        """Token ids of a short text; a long one holds the loop: see `encode_async`.

        Raises: BadModel: no tokenizer. BadRequest: the text is not Unicode (a lone surrogate).
        """
        inner = self._required()
        try:
            # The batch form releases the interpreter lock while it works; the plain form does not (measured: 1.2 s against 12 ms held).
            return list(inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except (UnicodeError, TypeError) as error:
            raise BadRequest("the text holds a lone surrogate: it is not valid Unicode") from error

    async def encode_async(self, text: str) -> list[int]:
        """Token ids of a text of any length; a long one is encoded on a worker thread. Raises as `encode`.

        Cancel: the worker finishes what it does; its result is dropped.
        """
        assert not self._closed, "the tokenizer is closed"
        if len(text) < _LONG_TEXT:
            return self.encode(text)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        return await asyncio.get_running_loop().run_in_executor(self._worker, self.encode, text)

    async def aclose(self) -> None:
        """Wait for the worker and let it go."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(worker.shutdown)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: perhaps part of a character. Empty for ids without a token."""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = None if self._inner is None or not 0 <= token_id < 2**32 else self._inner.id_to_token(token_id)
            known = self._bytes_of[token_id] = b"" if token is None else _bytes(token)
        return known

    def token_text(self, token_id: int) -> str:
        """A token as text, with U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark of the format rather than text."""
        return token_id in self._special

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """A whole text at once; special tokens are kept unless skipped."""
        kept = (token_id for token_id in token_ids if not (skip_special and self.is_special(token_id)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def _required(self) -> tokenizers.Tokenizer:
        if self._inner is None:
            raise BadModel(f"the model directory has no {FILE_NAME}: send token ids instead of text")
        return self._inner


def _bytes(token: str) -> bytes:
    """As the byte-level decoder does it: a token with a character outside the table (an added one) stands for its own text."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _parse(source: bytes) -> tokenizers.Tokenizer:
    try:
        decoder = json.loads(source).get("decoder")
        inner = tokenizers.Tokenizer.from_str(source.decode())
    except Exception as error:  # the library raises bare Exception
        raise BadModel(f"{FILE_NAME} cannot be read: {' '.join(str(error).split())}") from error
    kinds = {part.get("type") for part in (decoder or {}).get("decoders", [decoder or {}])}
    if kinds != {"ByteLevel"}:
        raise BadModel(f"{FILE_NAME}: its decoder must be ByteLevel, not {', '.join(sorted(map(str, kinds)))}")
    inner.no_truncation()
    inner.no_padding()
    return inner
