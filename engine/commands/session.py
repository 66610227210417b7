"""`forebay session`: sessions of a running server (session_client.py), and archives of sessions as directories.

On directories, without an engine: list, check, merge stages, split into stages. The table goes to standard output, progress to standard
error. Exit code: 0 all is well, 1 an archive in a list cannot be used, 3 the one that was named cannot be.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine import logs
from engine.commands.command import Command, Invocation
from engine.commands.display import Bar, bytes_text
from engine.commands.measuring import results
from engine.commands.session_client import ACTIONS, add_actions, add_server_flags, list_at_server
from engine.errors import BadSetting

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from engine.archive.listing import Found

__all__ = ["COMMAND"]

_LAYERS = re.compile(r"(\d{1,6})-(\d{1,6})")


def configure(parser: argparse.ArgumentParser) -> None:
    """One subcommand each for what can be done."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser(
        "list", help="sessions of a running server; of DIR its archives, exit 1 if one cannot be used", allow_abbrev=False
    )
    listed.add_argument("directory", metavar="DIR", nargs="?", help="an archive, or a directory of archives")
    add_server_flags(listed)
    add_actions(actions)
    check = actions.add_parser("check", help="compare every byte of an archive with its checksums", allow_abbrev=False)
    check.add_argument("directory", metavar="DIR", help="an archive")
    merge = actions.add_parser("merge", help="one archive of several stages' archives of one session", allow_abbrev=False)
    merge.add_argument("directory", metavar="TARGET", help="directory to make")
    merge.add_argument("sources", metavar="SOURCE", nargs="+", help="archives of consecutive layers, in any order")
    split = actions.add_parser("split", help="an archive a stage of one archive", allow_abbrev=False)
    split.add_argument("directory", metavar="SOURCE", help="an archive")
    split.add_argument("stages", metavar="FIRST-LAST:TARGET", nargs="+", help="layers of a stage, and the directory to make")


def _path(text: object, name: str) -> Path:
    """What was named; an empty name, as of a variable that is not set, would be the present directory."""
    if not text:
        raise BadSetting(f"{name} must be some text, not ''")
    return Path(str(text))


def _list(invocation: Invocation) -> int:
    """Returns 1 when an archive cannot be used, else 0."""
    if invocation.options.get("directory") is None:
        return list_at_server(invocation)
    from engine.archive.listing import look

    found = look(_path(invocation.options["directory"], "DIR"))
    if invocation.options.get("as_json"):
        for one in found:
            print(json.dumps(_facts(one)))
    else:
        results().print(_table(found))
    return 1 if any(one.manifest is None for one in found) else 0


def _facts(one: "Found") -> dict[str, object]:
    if one.manifest is None:
        return {"directory": one.path.name, "error": one.wrong}
    manifest = one.manifest
    return {
        "directory": one.path.name, "session": manifest.session, "revision": manifest.revision, "tokens": len(manifest.tokens),
        "rows": manifest.rows, "model": manifest.model, "layers": [manifest.first_layer, manifest.first_layer + manifest.layers - 1],
        "mtp_rows": manifest.mtp_rows, "row_format": manifest.rows_as.encoding, "index_key_format": manifest.keys_as.encoding,
        "payload_bytes": manifest.payload_bytes, "file_bytes": one.file_bytes,
    }  # fmt: skip


def _table(found: list["Found"]) -> Table:
    table = Table()
    for name in ("directory", "session", "revision", "tokens", "rows", "size", "rows as", "model"):
        table.add_column(name, justify="right" if name in ("revision", "tokens", "rows", "size") else "left")
    for one in found:
        if one.manifest is None:
            table.add_row(Text(one.path.name), Text(one.wrong, style="red"))
            continue
        manifest = one.manifest
        table.add_row(
            Text(one.path.name), manifest.session, str(manifest.revision), f"{len(manifest.tokens):,}", f"{manifest.rows:,}",
            bytes_text(one.file_bytes), manifest.rows_as.encoding, Text(manifest.model),
        )  # fmt: skip
    return table


def _check(invocation: Invocation) -> int:
    """Returns 0. Raises BadSetting, ArchiveRefused."""
    from engine.archive.listing import verify

    directory, started = _path(invocation.options["directory"], "DIR"), time.monotonic()
    bar = Bar("checking", "archive.checking", "bytes", Console(file=sys.stderr))
    try:
        manifest = verify(directory, bar.update)
    finally:
        bar.close()
    rate = manifest.payload_bytes / max(time.monotonic() - started, 1e-9)
    print(f"session {manifest.session}: {manifest.rows:,} rows, {bytes_text(manifest.payload_bytes)} at {bytes_text(int(rate))}/s: sound")
    return 0


def _merge(invocation: Invocation) -> int:
    """Returns 0. Raises ForebayError."""
    from engine.archive.stages import merge

    sources = invocation.options["sources"]
    assert isinstance(sources, list), "argparse makes a list"
    merged = merge([_path(one, "SOURCE") for one in sources], _path(invocation.options["directory"], "TARGET"))
    print(f"session {merged.session}: layers {merged.first_layer} to {merged.first_layer + merged.layers - 1}, {merged.rows:,} rows")
    return 0


def _split(invocation: Invocation) -> int:
    """Returns 0. Raises ForebayError."""
    from engine.archive.stages import split

    stages = invocation.options["stages"]
    assert isinstance(stages, list), "argparse makes a list"
    ranges, targets = [], []
    for text in stages:
        layers, colon, target = str(text).partition(":")
        matched = _LAYERS.fullmatch(layers)
        if matched is None or not colon or not target or int(matched[1]) > int(matched[2]):
            raise BadSetting(f"a stage is written FIRST-LAST:TARGET, as 0-38:left, not {text!r}")
        ranges.append(range(int(matched[1]), int(matched[2]) + 1))
        targets.append(Path(target))
    for one in split(_path(invocation.options["directory"], "SOURCE"), ranges, targets):
        print(f"session {one.session}: layers {one.first_layer} to {one.first_layer + one.layers - 1}, {one.rows:,} rows")
    return 0


_ACTIONS = {"list": _list, "check": _check, "merge": _merge, "split": _split, **ACTIONS}


def run(invocation: Invocation) -> int:
    """Returns the action's exit code. Raises ForebayError."""
    logs.configure(invocation.settings.server.log_format)
    return _ACTIONS[str(invocation.options["action"])](invocation)


COMMAND = Command("session", "sessions of a running server, and their archives: list, show, fork, archive, check and more", configure, run)
