"""`forebay tape export` and `forebay tape diff`: tapes as files, without running anything."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands.command import Invocation
from engine.errors import BadSetting
from engine.settings import parse_integer, parse_seconds

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from streams import Tape

__all__ = ["add_diff", "add_export", "read_tape", "run_diff", "run_export", "writable"]

_FORMATS = ("chrome", "svg")
_STEP_BEGINS = ("step.begin", "step")  # issued anew, and replayed


def add_export(parser: argparse.ArgumentParser) -> None:
    """The tape, the form, the part."""
    parser.add_argument("tape", metavar="TAPE", help="tape to export")
    parser.add_argument("--out", metavar="FILE", required=True, help="file to write")
    parser.add_argument("--format", metavar="|".join(_FORMATS), default="chrome", help="chrome (the default): for Perfetto; svg: a picture")
    parser.add_argument("--from-ms", dest="from_ms", metavar="X", help="svg: where the picture begins (default: the tape's begin)")
    parser.add_argument("--to-ms", dest="to_ms", metavar="X", help="svg: where it ends (default: the tape's end)")
    parser.add_argument("--step", metavar="N", help="svg: only the tape's Nth decode step, from 1, up to where the next one begins")


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Two tapes."""
    parser.add_argument("tape", metavar="A", help="a tape")
    parser.add_argument("other", metavar="B", help="another")


def run_export(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting."""
    options = invocation.options
    form, part = str(options["format"]), [_milliseconds(options, name) for name in ("from_ms", "to_ms")]
    if form not in _FORMATS:
        raise BadSetting(f"--format must be one of {', '.join(_FORMATS)}, not {form!r}")
    step = options.get("step")
    if form == "chrome" and (part != [None, None] or step is not None):
        raise BadSetting("--from-ms, --to-ms and --step are for --format svg; Perfetto zooms by itself")
    if step is not None and part != [None, None]:
        raise BadSetting("--step and --from-ms or --to-ms exclude each other; give one")
    tape, path = read_tape(str(options["tape"])), writable(str(options["out"]))
    from streams import TapeMismatch, chrome_trace, picture

    if path.exists() and path.samefile(str(options["tape"])):
        raise BadSetting(f"--out: {path} is the tape itself")
    try:
        tape.check_numbers()
    except TapeMismatch as error:
        raise BadSetting(f"{options['tape']}: {error}") from error
    first_ns, last_ns = part if step is None else _step(tape, str(step))
    if form == "svg" and (first_ns or 0) >= (last_ns if last_ns is not None else tape.length_ns):
        raise BadSetting(f"nothing lies between --from-ms and --to-ms; the tape is {tape.length_ns / 1e6:.3f} ms long")
    try:
        path.write_bytes(chrome_trace(tape) if form == "chrome" else picture(tape, first_ns or 0, last_ns))
    except OSError as error:
        raise BadSetting(f"--out: cannot write {path}: {error.strerror or error}") from error
    print(f"{len(tape.records):,} records, {tape.length_ns / 1e6:.3f} ms: {path}")
    return 0


def _step(tape: "Tape", text: str) -> tuple[int, int]:
    """Where the Nth decode step begins, and where the next one does or the tape ends. Raises BadSetting."""
    from streams.tape import Completed, Submitted

    begins = {record.number for record in tape.records if isinstance(record, Submitted) and record.label in _STEP_BEGINS}
    starts = [record.started_ns for record in tape.records if isinstance(record, Completed) and record.number in begins]
    found = sorted(start for start in starts if start >= 0)
    try:
        step = parse_integer(text)
    except ValueError as error:
        raise BadSetting(f"--step must be {error}, not {text!r}") from None
    if not 1 <= step <= len(found):
        raise BadSetting(f"--step must be from 1 to {len(found)}, the decode steps on the tape, not {step}")
    return found[step - 1], found[step] if step < len(found) else tape.length_ns


def run_diff(invocation: Invocation) -> int:
    """Returns 0 when the tapes hold the same events, times, waits, notes and names of sessions aside; else 1."""
    tape, other = (read_tape(str(invocation.options[name])) for name in ("tape", "other"))
    difference = tape.diff(other)
    if difference is None:
        from streams.tape import Completed, Submitted

        print(f"the same {sum(isinstance(record, Submitted | Completed) for record in tape.records):,} submissions and completions")
        return 0
    print(difference)
    return 1


def read_tape(name: str) -> "Tape":
    """Read a tape file. Raises: BadSetting: it cannot be read, or is damaged; names the line."""
    from streams import Tape, TapeMismatch

    try:
        return Tape.read(Path(name))
    except OSError as error:
        raise BadSetting(f"cannot read {name}: {error.strerror or error}") from error
    except TapeMismatch as mismatch:
        raise BadSetting(str(mismatch)) from mismatch


def writable(name: str) -> Path:
    """A path for --out, checked before anything long is begun. Raises BadSetting."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise BadSetting(f"--out: {path} is a directory" if path.is_dir() else f"--out: {path.parent} is not a directory")
    return path


def _milliseconds(options: Mapping[str, object], name: str) -> int | None:
    """The option in ns."""
    text = options.get(name)
    try:
        value = None if text is None else parse_seconds(str(text))
    except ValueError:
        value = -1.0
    if value is None:
        return None
    if value < 0:
        raise BadSetting(f"--{name.replace('_', '-')} must be a number of milliseconds of at least 0, not {text!r}")
    return round(value * 1e6)
