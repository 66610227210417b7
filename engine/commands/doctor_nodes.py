"""`forebay doctor cluster`: all nodes side by side, and the network between them. `--listen`: let this machine be looked at.

A table for people, JSON for programs. The exit code is 0 whatever was found, but 5 where no node answered.
"""

import asyncio
import json
import sys

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.commands.command import Invocation
from engine.commands.display import Bar
from engine.commands.signals import Signals
from engine.errors import BadSetting
from engine.node.comparison import Line, as_json, lines, pair_lines
from engine.node.keys import key_of, limits_of
from engine.node.visit import Effort, Findings, visit
from engine.node.waiting_room import wait_for_doctor
from engine.remote import Unreachable
from streams import StreamError

__all__ = ["answer_others", "examine_nodes", "print_findings"]

_STYLE_OF = {"same": "green", "differs": "bold yellow", "bad": "bold red", "unknown": "yellow"}


def examine_nodes(invocation: Invocation, console: Console) -> int:
    """Returns 0. Raises BadSetting; Unreachable: nobody answered."""
    cluster = invocation.settings.cluster
    if not cluster.nodes:
        raise BadSetting("no nodes: name them with --nodes host:port,...")
    effort = Effort(limits_of(cluster))
    with Bar("asking the nodes", "doctor.running", "nodes", Console(file=sys.stderr)) as bar:
        found = uvloop.run(visit(cluster.nodes, key_of(cluster), effort, bar.update))
    print_findings(found, console, as_json_text=bool(invocation.options.get("json")))
    if len(found.lost) == len(found.nodes):
        raise Unreachable(f"no node answered: {next(iter(found.lost.values()))}")
    return 0


def print_findings(found: Findings, console: Console, *, as_json_text: bool) -> None:
    """The tables, or one JSON object."""
    if as_json_text:
        print(json.dumps(as_json(found), indent=1), file=console.file)
        return
    compared = lines(found)
    console.print(_side_by_side(found, compared))
    if found.pairs:
        console.print(_network(found))
    for state in ("bad", "differs"):
        names = ", ".join(line.name for line in compared if line.state == state)
        if names:
            console.print(Text(f"{state}: {names}", style=_STYLE_OF[state]))


def _side_by_side(found: Findings, compared: list[Line]) -> Table:
    table = Table(title="nodes side by side", title_justify="left")
    table.add_column("")
    for node in found.nodes:
        table.add_column(str(node), overflow="fold")
    table.add_column("")
    table.add_column("what to do", overflow="fold")
    for line in compared:
        cells = [Text(value) for value in line.values]
        table.add_row(Text(line.name), *cells, Text(line.state, style=_STYLE_OF[line.state]), Text(line.advice))
    return table


def _network(found: Findings) -> Table:
    table = Table(title="from node to node", title_justify="left")
    for title in ("from", "to", "round-trip, ms", "MB/s", "clock, ms", "MTU", ""):
        table.add_column(title, justify="left" if title in ("from", "to", "") else "right", overflow="fold")
    for one, other, pair, said in pair_lines(found):
        rate = "-" if pair.bytes_per_second is None else f"{pair.bytes_per_second / 1e6:.0f}"
        trip = "-" if pair.round_trip_ms is None else f"{pair.round_trip_ms:.3f}"
        offset = "-" if pair.offset_ms is None else f"{pair.offset_ms:+.1f}"
        table.add_row(str(one), str(other), trip, rate, offset, "-" if pair.mtu is None else str(pair.mtu), Text(said))
    return table


def answer_others(invocation: Invocation, console: Console) -> int:
    """Answer until a signal. Returns 0. Raises BadSetting; Unreachable: the address cannot be had."""
    cluster = invocation.settings.cluster
    address, key = cluster.listen, key_of(cluster)
    assert address is not None, "asked for without --listen"

    def told(port: int) -> None:
        console.print(f"answering forebay doctor at {address._replace(port=port)}; Ctrl-C ends it", highlight=False, soft_wrap=True)

    async def answer() -> None:
        signals = Signals()
        with signals.caught():
            async with signals.until_signal():
                await wait_for_doctor(address, key, limits_of(cluster), told)
            await asyncio.sleep(0)

    try:
        uvloop.run(answer())
    except StreamError as error:
        raise Unreachable(f"{error}; choose another --listen") from error
    return 0
