"""`forebay tape record` and `forebay tape replay`: a generation on a tape, and again in the order the tape has.

The header of a recorded tape holds the model's directory, the settings, the prompt's ids and the tokens: a replay needs nothing else.
That of a tape of the search names a scenario and a seed: its replay runs them again.
"""

import argparse
import dataclasses
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop

from engine.commands.command import Invocation
from engine.commands.display import Bar
from engine.commands.tape_files import read_tape, writable
from engine.errors import BadSetting, ForebayError
from engine.settings import SETTINGS, add_flags, parse_integer

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from streams import Tape

__all__ = ["add_record", "add_replay", "run_record", "run_replay"]

_MAX_TOKENS = 64
_FLAGS = (
    "demo",
    "placement",
    "hot_rows",
    "host_memory",
    "append_chunk_rows",
    "append_gap",
    "context_max",
    "row_format",
    "index_key_format",
    "log_format",
)


def add_record(parser: argparse.ArgumentParser) -> None:
    """The model, the prompt, how many tokens, and where to."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SETTINGS["model"].meaning)
    parser.add_argument("--prompt-file", dest="prompt_file", metavar="FILE", help="text to continue")
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help="instead of a text, N made-up token ids")
    parser.add_argument("--max-tokens", dest="max_tokens", metavar="N", help=f"new tokens, exactly (default: {_MAX_TOKENS})")
    parser.add_argument("--out", metavar="TAPE", required=True, help="file to write, JSON lines")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file of settings")
    add_flags(parser, _FLAGS)


def add_replay(parser: argparse.ArgumentParser) -> None:
    """The tape; the model only if it has moved."""
    parser.add_argument("tape", metavar="TAPE", help="made by forebay tape record or forebay tape search")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same model elsewhere (default: the directory named on the tape)")
    parser.add_argument("--out", metavar="TAPE", help="also write the replay's own tape, for forebay tape diff")


def run_record(invocation: Invocation) -> int:
    """Record one generation. Returns 0. Raises ForebayError."""
    options = invocation.options
    directory = invocation.settings.model_directory().absolute()
    count = _count(options.get("max_tokens"), "--max-tokens", _MAX_TOKENS)
    path = writable(str(options["out"]))
    from engine.recording import RecordedRun, record  # here: torch takes seconds to import, and no other action needs the engine

    config = dataclasses.replace(invocation.settings.engine, device="cpu")
    run = RecordedRun(directory, config, _prompt(directory, options.get("prompt_file"), options.get("prompt_tokens")), count)
    with Bar("recording", "tape.recording", "tokens") as bar:
        try:
            made = uvloop.run(record(run, path, bar.update))
        except OSError as error:
            raise BadSetting(f"--out: cannot write {path}: {error.strerror or error}") from error
    print(f"tokens: {' '.join(map(str, made.run.tokens or ()))}")
    print(f"{len(run.prompt):,} prompt tokens, {count:,} new, {made.operations:,} operations; tape: {path}")
    return 0


def run_replay(invocation: Invocation) -> int:
    """Replay a tape. Returns 0. Raises ForebayError: the run leaves the tape, or the tokens differ; BadSetting."""
    options = invocation.options
    tape = read_tape(str(options["tape"]))
    path = writable(str(options["out"])) if options.get("out") else None
    if path is not None and path.exists() and path.samefile(str(options["tape"])):
        raise BadSetting(f"--out: {path} is the tape itself")
    if "scenario" in tape.header.notes:
        return _replay_seed(tape, options, path)
    from engine.recording import RecordedRun, replay
    from streams import Escaped, Tape, TapeMismatch

    run = RecordedRun.of_notes(tape.header.notes)
    taped = run.tokens
    if taped is None:
        raise BadSetting(f"{options['tape']} has no tokens to compare with: the recorded run did not end well")
    if options.get("model"):
        run = dataclasses.replace(run, model=Path(str(options["model"])))
    # A run that leaves its tape breaks in many places; the one line says where it began.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        tokens, records = uvloop.run(replay(run, tape))
    except TapeMismatch as mismatch:
        raise ForebayError(f"the replay leaves {options['tape']}: {mismatch}") from mismatch
    except Escaped as escaped:
        raise ForebayError(f"the replay asked the real world: {escaped}") from escaped
    if path is not None:
        try:
            path.write_bytes(Tape(tape.header, records).encode())
        except OSError as error:
            raise BadSetting(f"--out: cannot write {path}: {error.strerror or error}") from error
    unequal = _unequal(tokens, taped)
    if unequal:
        raise ForebayError(unequal)
    print(f"{len(tokens):,} tokens, equal to the tape's, in its order of {sum(map(_is_completion, records)):,} completions")
    return 0


def _replay_seed(tape: "Tape", options: Mapping[str, object], path: Path | None) -> int:
    """Run the seed that a tape of `forebay tape search` is of. Returns 0: it went and ended as on the tape. Raises ForebayError."""
    from engine.search.hunt import repeat
    from streams import TapeMismatch

    if options.get("model"):
        raise BadSetting(f"{options['tape']} is of forebay tape search, which brings its own model: leave MODEL out")
    try:
        found = repeat(tape, path)
    except TapeMismatch as mismatch:
        raise ForebayError(f"the replay leaves {options['tape']}: {mismatch}") from mismatch
    except OSError as error:
        raise BadSetting(f"--out: cannot write {path}: {error.strerror or error}") from error
    print(f"{found or 'nothing found'}, as on the tape")
    return 0


def _unequal(tokens: tuple[int, ...], taped: tuple[int, ...]) -> str:
    """The first token that differs, in words; "" when none does."""
    for place, (token, was) in enumerate(zip(tokens, taped, strict=False)):
        if token != was:
            return f"token {place} is {token} in the replay and {was} on the tape"
    return "" if len(tokens) == len(taped) else f"the replay made {len(tokens)} tokens; the tape has {len(taped)}"


def _is_completion(record: object) -> bool:
    from streams.tape import Completed

    return isinstance(record, Completed)


def _prompt(directory: Path, file: object, tokens: object) -> tuple[int, ...]:
    """The prompt's ids: of a text, or made up."""
    if (file is None) == (tokens is None):
        raise BadSetting("give either --prompt-file or --prompt-tokens")
    if file is None:
        from engine.model.config import ModelConfig

        draw, vocabulary = random.Random(0), ModelConfig.read(directory).vocabulary
        return tuple(draw.randrange(vocabulary) for _ in range(_count(tokens, "--prompt-tokens", 0)))
    from engine.text.tokenizer import Tokenizer

    try:
        text = Path(str(file)).read_text(encoding="utf-8")
    except OSError as error:
        raise BadSetting(f"--prompt-file: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadSetting(f"--prompt-file: {file} is not UTF-8: byte {error.start}") from error
    ids = Tokenizer.load(directory).encode(text)
    if not ids:
        raise BadSetting(f"--prompt-file: {file} is empty")
    return tuple(ids)


def _count(text: object, flag: str, default: int) -> int:
    try:
        count = default if text is None else parse_integer(str(text))
    except ValueError as error:
        raise BadSetting(f"{flag} must be {error}, not {text!r}") from None
    if count < 1:
        raise BadSetting(f"{flag} must be at least 1, not {count}")
    return count
