"""The corpus: the running Python's standard-library source as token streams, with a fixed held-out part, packed in one file with a hash.

Holds: which files are taken, the split, dialogues made from documented functions, packing. Does not know: rows, batches, needles.

1. The same Python, tokenizer and code give the same bytes; `Corpus.digest` names them, and a training record carries it.
2. A file is held out by the hash of its path alone, so the split does not move when others come or go.
3. Held-out files appear in no stream but their own; duplicates (by text) are taken once, at the first path.
4. `outside` is source that is no part of the standard library (pip's own modules): unseen by every model trained this way.
"""

import ast
import hashlib
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

__all__ = [
    "END", "Corpus", "Stream", "build", "dialogues_of", "held_out", "held_out_stream", "library_files", "load", "outside_stream", "save",
]  # fmt: skip

Stream = npt.NDArray[np.uint16]

END = "<|endoftext|>"
HELD_OUT_PART = 40  # one file in so many
SKIPPED = ("encodings", "__pycache__", "site-packages", "lib-dynload", "config-3")
NAMES = ("train", "held_out", "outside", "dialogues")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams, uint16. `token_bytes` int64 [vocabulary]: UTF-8 bytes of each token, 0 for special ones."""

    train: Stream
    held_out: Stream
    outside: Stream
    dialogues: Stream
    token_bytes: npt.NDArray[np.int64]
    python: str

    @property
    def digest(self) -> str:
        """SHA-256 over all streams, hexadecimal."""
        total = hashlib.sha256()
        for name in NAMES:
            total.update(name.encode() + getattr(self, name).astype("<u2").tobytes())
        return total.hexdigest()


def held_out(path: str) -> bool:
    """Whether the file of this path relative to the library's root is held out."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % HELD_OUT_PART == 0


def library_files(root: Path) -> Iterator[tuple[str, str]]:
    """Relative path and text of every clean, distinct .py file under `root`, in path order."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if any(part.startswith(SKIPPED) for part in relative.split("/")):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 64 or "\0" in text or "\ufffd" in text or text in seen:
            continue
        seen.add(text)
        yield relative, text.replace("\r\n", "\n")


def dialogues_of(text: str) -> Iterator[str]:
    """Short dialogues, one for each documented small top-level function of a source text. Nothing if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's tests hold odd escapes on purpose
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        doc, source = ast.get_docstring(node), "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not doc or len(source) > 1200:
            continue
        sentence = doc.strip().split("\n\n")[0].replace("\n", " ")[:200]
        arguments = ast.unparse(node.args)[:80]
        yield (
            f"[gMASK]<sop><|user|>Write a Python function `{node.name}`: {sentence}<|assistant|>"
            f"<think>The user wants a function `{node.name}({arguments})`.</think>```python\n{source}\n```<|user|>"
        )


def _stream(texts: list[str], tokenizer: Tokenizer, end: str) -> Stream:
    ids: list[int] = []
    closing = [] if not end else tokenizer.encode(end).ids
    for encoding in tokenizer.encode_batch(texts):
        ids += encoding.ids + closing
    return np.asarray(ids, np.uint16)


def _bytes_of(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    count = tokenizer.get_vocab_size()
    # A byte-level vocabulary writes each byte as one printable character.
    names = [tokenizer.id_to_token(token) or "" for token in range(count)]
    return np.asarray([0 if name in special else len(name) for name in names], np.int64)


def build(tokenizer: Tokenizer, root: Path | None = None, outside: Path | None = None) -> Corpus:
    """Read and tokenise the library at `root` (this Python's own) and the outside text at `outside` (its pip's internal modules)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    outside = outside or root / "site-packages" / "pip" / "_internal"
    files = list(library_files(root))
    train = [text for path, text in files if not held_out(path)]
    return Corpus(
        train=_stream(train, tokenizer, END),
        held_out=_stream([text for path, text in files if held_out(path)], tokenizer, END),
        outside=_stream([text for _, text in library_files(outside)] if outside.is_dir() else [], tokenizer, END),
        dialogues=_stream([dialogue for text in train for dialogue in dialogues_of(text)], tokenizer, ""),
        token_bytes=_bytes_of(tokenizer),
        python=platform.python_version(),
    )


def held_out_stream(tokenizer: Tokenizer, root: Path | None = None) -> tuple[Stream, npt.NDArray[np.int64]]:
    """The held-out files' tokens alone, as `build` makes them, and the bytes of each token."""
    files = library_files(root or Path(sysconfig.get_paths()["stdlib"]))
    return _stream([text for path, text in files if held_out(path)], tokenizer, END), _bytes_of(tokenizer)


def outside_stream(tokenizer: Tokenizer) -> Stream:
    """The tokens of what is no part of the library (pip's internal modules), as `build` makes them; empty where there is no pip."""
    outside = Path(sysconfig.get_paths()["stdlib"]) / "site-packages" / "pip" / "_internal"
    return _stream([text for _, text in library_files(outside)] if outside.is_dir() else [], tokenizer, END)


def save(corpus: Corpus, path: Path) -> None:
    """Write the corpus to one compressed file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    note = np.frombuffer(json.dumps({"python": corpus.python, "digest": corpus.digest}).encode(), np.uint8)
    streams = {name: getattr(corpus, name) for name in NAMES}
    np.savez_compressed(path, allow_pickle=False, note=note, token_bytes=corpus.token_bytes, **streams)


def load(path: Path) -> Corpus:
    """Read a corpus. Raises ValueError, giving both hashes, if it is not the one that was written."""
    with np.load(path) as packed:
        note = json.loads(packed["note"].tobytes())
        corpus = Corpus(**{name: packed[name] for name in NAMES}, token_bytes=packed["token_bytes"], python=note["python"])
    if corpus.digest != note["digest"]:
        raise ValueError(f"{path}: streams hash to {corpus.digest}, the file says {note['digest']}")
    return corpus
