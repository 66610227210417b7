"""`forebay bench step`: decode steps on a tape, for `forebay tape export`.

Exit code: 0 the tape is written, 2 a bad command line.
"""

import argparse
import sys

import uvloop
from rich.console import Console

from engine.commands.bench_decode import add_model
from engine.commands.command import Command, Invocation
from engine.commands.measuring import Bars, count_of
from engine.commands.tape_files import writable
from engine.errors import BadSetting
from engine.gate import parse_history
from engine.settings import add_flags

__all__ = ["COMMAND"]

_PROMPT, _WARMUP = 64, 16


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, the history in front, and where the tape goes."""
    add_model(parser)
    add_flags(parser, ("placement",))
    parser.add_argument("--history", metavar="synthetic:SEED:ROWS", help="made-up rows before the prompt")
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", metavar="N", help=f"seeded ids that are really read ({_PROMPT})")
    parser.add_argument("--warmup-tokens", dest="warmup_tokens", metavar="N", help=f"tokens before the steps on the tape ({_WARMUP})")
    parser.add_argument("--out", metavar="TAPE", required=True, help="file to write; see forebay tape export")


def run(invocation: Invocation) -> int:
    """Returns 0. Raises ForebayError."""
    options = invocation.options
    path, model = writable(str(options["out"])), invocation.settings.model_directory()
    prompt, warmup = count_of(options, "prompt_tokens"), count_of(options, "warmup_tokens")
    history = None if options.get("history") is None else parse_history(str(options["history"]))
    from engine.bench.arm import Load
    from engine.bench.steps import taped_steps

    load = Load(
        model=model, history=history, prompt_tokens=_PROMPT if prompt is None else prompt,
        warmup_tokens=_WARMUP if warmup is None else warmup,
    )  # fmt: skip
    bars = Bars("bench.running", Console(file=sys.stderr))
    try:
        tape = uvloop.run(taped_steps(load, invocation.settings.engine, bars))
    finally:
        bars.close()
    try:
        path.write_bytes(tape.encode())
    except OSError as error:
        raise BadSetting(f"--out: cannot write {path}: {error.strerror or error}") from error
    print(f"{len(tape.records):,} records, {tape.length_ns / 1e6:.3f} ms: {path}")
    return 0


COMMAND = Command("step", "decode steps on a tape: which operation ran when, on which stream", configure, run)
