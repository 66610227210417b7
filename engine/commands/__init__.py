"""Subcommands of `forebay`, a file each.

A file holds one `COMMAND`: its name, a line about it, the flags it adds and the function that runs it. `line.py` parses, resolves
settings and dispatches; `display.py` draws progress and tables. A command that needs the HTTP server gets it in its `Invocation`.

A command is listed here when it is built; before that it does not exist, and the command line says which do.
"""

from engine.commands import bench, convert, demo, demo_cluster, doctor, gate, node, plan, run, serve, session, simulate, soak, tape
from engine.commands.command import Command, Invocation, Serve, WhileReady

__all__ = ["COMMANDS", "Command", "Invocation", "Serve", "WhileReady"]

COMMANDS: tuple[Command, ...] = (
    serve.COMMAND, run.COMMAND, demo.COMMAND, doctor.COMMAND, gate.COMMAND, bench.COMMAND, tape.COMMAND, session.COMMAND, plan.COMMAND,
    simulate.COMMAND, soak.COMMAND, convert.COMMAND, node.COMMAND, demo_cluster.COMMAND,
)  # fmt: skip
