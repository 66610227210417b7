"""`forebay convert MODEL OUT`: a bf16 checkpoint made smaller, in forms that other engines read too.

Run again after it was stopped: it goes on. Exit code: 0 when OUT is whole.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.commands.command import Command, Invocation
from engine.commands.display import Bar, bytes_text
from engine.commands.measuring import count_of, results
from engine.errors import BadSetting

if TYPE_CHECKING:
    from engine.convert import Recipe

__all__ = ["COMMAND", "recipe_of"]

_KINDS = {
    "mlp": "dense MLPs and shared experts",
    "attention": "attention's projections",
    "indexer": "the indexers' projections",
    "router": "the routers, which choose experts (not advised)",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """What becomes what."""
    parser.add_argument("source", metavar="MODEL", help="directory of a bf16 checkpoint")
    parser.add_argument("target", metavar="OUT", help="directory to write: new, or one that a stopped conversion left")
    parser.add_argument("--weights", metavar="int4|int8|fp8", default="int4", help="form of the routed experts (int4)")
    parser.add_argument("--group", metavar="32|64|128", help="values that share a scale, in int4 and int8 (64)")
    for kind, what in _KINDS.items():
        parser.add_argument(f"--{kind}", metavar="int4|int8|fp8|bf16", default="bf16", help=f"form of {what} (bf16: as they are)")
    parser.add_argument("--mtp", action="store_true", help="the MTP block's weights too, in the forms of the main layers")


def recipe_of(options: Any) -> "Recipe":
    """What is asked for. Raises BadSetting."""
    from engine.convert import Recipe

    group = count_of(options, "group")
    forms = {"experts": options["weights"], **{kind: options[kind] for kind in _KINDS if options[kind] != "bf16"}}
    return Recipe(forms, 64 if group is None else group, bool(options["mtp"]))


def run(invocation: Invocation) -> int:
    """Returns 0. Raises BadModel, BadSetting."""
    options = invocation.options
    recipe = recipe_of(options)
    from engine.convert import convert

    source, target = Path(str(options["source"])), Path(str(options["target"]))
    if not source.is_dir():
        raise BadSetting(f"model directory {source} does not exist")
    with Bar("converting", "convert.running", "weights") as bar:
        size = convert(source, target, recipe, bar.update)
    results().print(f"{target}: {bytes_text(size)}")
    return 0


COMMAND = Command("convert", "a bf16 checkpoint in int4, int8 or block-FP8, for cards it would not fit on", configure, run)
