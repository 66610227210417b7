"""One generation on a tape, and again from it: what a replay has to know stands in the tape's own header.

Holds `RecordedRun` (model, settings, prompt, tokens) with its form as notes of a tape, recording on the CPU backend, and replaying on the
virtual one. Knows no command line.

1. Recording and replaying drive the engine by the same function: they differ in the backend alone.
2. A tape gets its name when the run is over. One whose run failed is kept, without tokens; one of a run that never began is not.
3. A replay ends, whatever the tape says: with tokens, or with the `TapeMismatch` that names the event.
4. A replay generates under the seal: what it asks of the real world is an `Escaped`. Loading the model and closing are outside.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BadModel, BadRequest, BadSetting, NotAdmitted
from engine.sampling import Sampling
from engine.settings import nearest
from streams import Backend, CpuBackend, Escaped, ReplayOrder, Tape, TapeFile, TapeMismatch, TapeRecorder, VirtualBackend, sealed
from streams.tape import Record, write_notes

__all__ = ["RecordedRun", "record", "replay"]

_FIELDS = ("model", "settings", "prompt", "max_tokens")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What was run: greedy, not stopping at an end-of-text token. `tokens` is None until the run has ended well."""

    model: Path
    config: EngineConfig
    prompt: tuple[int, ...]
    max_tokens: int
    tokens: tuple[int, ...] | None = None

    def notes(self) -> dict[str, str]:
        """As the notes of a tape's header: JSON texts by field."""
        notes = {
            "model": str(self.model), "settings": _json(self.config), "prompt": _json(self.prompt), "max_tokens": str(self.max_tokens),
        }  # fmt: skip
        return notes if self.tokens is None else {**notes, "tokens": _json(self.tokens)}

    @classmethod
    def of_notes(cls, notes: Mapping[str, str]) -> Self:
        """Read back. Raises: BadSetting: this tape's header does not say how to run it again."""
        missing = [name for name in _FIELDS if name not in notes]
        if missing:
            raise BadSetting(f"the tape's header has no {' and no '.join(missing)}: it was not made by forebay tape record")
        try:
            ids = msgspec.json.Decoder(tuple[int, ...])
            return cls(
                Path(notes["model"]), _config(notes["settings"]), ids.decode(notes["prompt"]),
                int(notes["max_tokens"]), ids.decode(notes["tokens"]) if "tokens" in notes else None,
            )  # fmt: skip
        except (ValueError, msgspec.MsgspecError) as error:
            raise BadSetting(f"the tape's header cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Recording:
    """A run that was recorded, and how many operations its tape has."""

    run: RecordedRun
    operations: int


async def record(run: RecordedRun, path: Path, progress: Callable[[int, int], None] | None = None) -> Recording:
    """Run once on worker threads and write the tape to `path`.

    Args: progress: called with (tokens, tokens in all).
    Raises: ForebayError, as a generation does; OSError: the file cannot be written.
    """
    rough = path.with_name(path.name + ".part")
    file = TapeFile(rough, run.notes())
    recorder = TapeRecorder(file.append)
    backend = CpuBackend(recorder)
    try:
        run = dataclasses.replace(run, tokens=await _generate(run, backend, progress))
    finally:
        await backend.close()
        recorder.flush()
        file.close()
        try:
            if backend.statistics().submitted:
                write_notes(rough, path, run.notes())
        finally:
            rough.unlink()
    return Recording(run, backend.statistics().submitted)


async def replay(run: RecordedRun, tape: Tape) -> tuple[tuple[int, ...], tuple[Record, ...]]:
    """Run once on the virtual backend, operations completing in the tape's order. Returns the tokens and the replay's own records.

    Raises: TapeMismatch: the run asks for what the tape has not, or the tape wants what the run does not do; names the event.
        Escaped: the run asked for real time or real I/O.
    """
    records: list[Record] = []
    recorder = TapeRecorder(records.extend)
    backend = VirtualBackend(ReplayOrder(tape), observer=recorder)
    try:
        tokens = await _generate(run, backend, within=sealed)
    except (Escaped, TapeMismatch):
        raise
    except (BadModel, BadRequest, BadSetting, NotAdmitted):  # this machine cannot begin the run at all: that is not the tape's word
        with contextlib.suppress(TapeMismatch):
            await backend.close()
        raise
    except Exception as failure:
        # What ends the request follows from the first event that differed, which the backend knows.
        try:
            await backend.close()
        except TapeMismatch as mismatch:
            raise mismatch from failure
        raise
    await backend.close()
    recorder.flush()
    return tokens, tuple(records)


async def _generate(
    run: RecordedRun,
    backend: Backend,
    progress: Callable[[int, int], None] | None = None,
    *,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[int, ...]:
    """Tokens of one generation in a session of its own, made inside `within()`."""
    sampling = Sampling(max_tokens=run.max_tokens, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    async with Engine.open(run.model, run.config, backend=backend) as engine:
        room = engine.context_max - len(run.prompt)
        if run.max_tokens > room:
            raise BadRequest(f"{len(run.prompt)} prompt tokens leave room for {max(room, 0)} of the context, not {run.max_tokens}")
        with within():
            async for chunk in engine.generate(run.prompt, sampling):
                tokens.extend(chunk.token_ids)
                if progress is not None:
                    progress(len(tokens), run.max_tokens)
    return tuple(tokens)


def _config(text: str) -> EngineConfig:
    """Of a header's settings. Raises: BadSetting: one that is not known here, or a value that cannot be; MsgspecError: damaged."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in msgspec.json.decode(text, type=dict[str, object]):
        if name not in known:
            raise BadSetting(f"the tape's header has a setting {name!r}, which is not known here{nearest(name, known)}")
    return msgspec.json.decode(text, type=EngineConfig)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
