"""`forebay bench`: what parts and the whole of the engine take on this machine. A subcommand each; they are listed in `ACTIONS`.

A subcommand lives in a module of its own, `bench_<name>.py`, with one `COMMAND`: what it measures lies in `engine/bench/`, imported when it
runs, because torch takes seconds to import and --help needs none of it.
"""

import argparse
from dataclasses import replace

from engine import logs
from engine.commands import (
    bench_append,
    bench_archive,
    bench_channel,
    bench_decode,
    bench_host,
    bench_kernels,
    bench_keys,
    bench_parity,
    bench_pipeline,
    bench_round,
    bench_serve,
    bench_sessions,
    bench_step,
    bench_weights,
)  # fmt: skip
from engine.commands.command import Command, Invocation
from engine.commands.measuring import steady

__all__ = ["ACTIONS", "COMMAND"]

ACTIONS: tuple[Command, ...] = (
    bench_decode.COMMAND, bench_append.COMMAND, bench_host.COMMAND, bench_parity.COMMAND, bench_step.COMMAND,
    bench_kernels.COMMAND, bench_round.COMMAND, bench_archive.COMMAND, bench_sessions.COMMAND, bench_serve.COMMAND,
    bench_keys.COMMAND, bench_weights.COMMAND,
    bench_channel.COMMAND, bench_pipeline.COMMAND,
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """One subcommand each for what can be measured."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in ACTIONS:
        one = actions.add_parser(action.name, help=action.summary, description=action.summary, allow_abbrev=False)
        one.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file of settings")
        action.configure(one)


def run(invocation: Invocation) -> int:
    """Returns the subcommand's exit code. Raises ForebayError."""
    logs.configure(invocation.settings.server.log_format)
    chosen = next(action for action in ACTIONS if action.name == invocation.options["action"])
    return chosen.run(replace(invocation, settings=steady(invocation.settings)))


COMMAND = Command("bench", "measure decoding, appends, many sessions, the host, and single kernels", configure, run)
