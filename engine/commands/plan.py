"""`forebay plan`: what fits on which machines, from arithmetic alone.

A config.json (or its directory, or a name) and some boxes in; tables, a verdict, or JSON out. Exit code: 0 when what was asked fits, 4 when
it does not.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.text import Text

from engine.commands.command import Command, Invocation
from engine.commands.measuring import count_of, results
from engine.errors import BadSetting, NotAdmitted
from engine.settings import add_flags, parse_size

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from engine.plan import Plan, WeightForm

__all__ = ["COMMAND", "report", "tokens_of"]

_LETTERS = {"K": 1 << 10, "M": 1 << 20}
_SETTINGS = ("placement", "hot_rows", "draft_depth", "append_chunk_rows", "row_format", "host_memory")


def configure(parser: argparse.ArgumentParser) -> None:
    """What, how much, and on what."""
    parser.add_argument(
        "model", nargs="?", metavar="CONFIG", help="config.json, its directory, or a name like glm-5.3-slice (default glm-5.3)"
    )
    parser.add_argument("--context", metavar="N", help="tokens a session may reach, like 50000, 128K or 1M (1,024 x 1,024); default 1M")
    parser.add_argument("--sessions", metavar="N", help="sessions that decode together (15)")
    parser.add_argument("--nodes", dest="machines", metavar="N", help="machines (2)")  # `nodes` is a setting: the addresses of a cluster's
    parser.add_argument("--ram", metavar="SIZE", help="RAM of a machine (1TiB)")
    parser.add_argument("--cards", metavar="N", help="cards of a machine (8)")
    parser.add_argument("--vram", metavar="SIZE", help="memory of a card (48GiB)")
    parser.add_argument("--cards-per-stage", metavar="1|2", help="2: owner and peer share a stage's layers (2 where cards are even)")
    parser.add_argument("--weights", metavar="bf16|fp8|int4|int8|mix|f32", help="how weights are stored; default: as the config says")
    parser.add_argument("--weight-group", metavar="N", help="inputs that share a scale in int4, int8 and mix (64)")
    parser.add_argument("--without-mtp", action="store_true", help="leave the MTP block out")
    parser.add_argument("--index-key-format", dest="keys", metavar="auto|bf16|f32|e4m3", help="how index keys are stored (auto)")
    parser.add_argument("--mirror-replicas", dest="replicas", metavar="1|2", help="copies of a history in RAM (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_flags(parser, _SETTINGS)


def tokens_of(text: str) -> int:
    """Tokens: a count, or one with K or M. Raises BadSetting."""
    digits, letter = (text[:-1], text[-1].upper()) if text[-1:].upper() in _LETTERS else (text, "")
    try:
        return int(digits) * _LETTERS.get(letter, 1)
    except ValueError:
        raise BadSetting(f"--context must be a count like 50000, 128K or 1M, not {text!r}") from None


def _size(options: Mapping[str, object], name: str, otherwise: int) -> int:
    text = options.get(name)
    if text is None:
        return otherwise
    try:
        return parse_size(str(text))
    except ValueError:
        raise BadSetting(f"--{name} must be a size like 48GiB, not {text!r}") from None


def _count(options: Mapping[str, object], name: str, otherwise: int) -> int:
    count = count_of(options, name)
    return otherwise if count is None else count


def _config(model: str, asked: "WeightForm | None") -> "tuple[ModelConfig, WeightForm]":
    """The model's shape, and how its weights are stored: as asked, else as its config says. Raises BadModel, BadSetting."""
    from engine.model.config import ModelConfig
    from engine.model.fields import read_json
    from engine.model.named import NAMED
    from engine.plan import WeightForm

    path = Path(model)
    if model in NAMED and not path.exists():
        config, raw = ModelConfig.read(NAMED[model]), dict(NAMED[model])
    else:
        file = path / "config.json" if path.is_dir() else path
        raw = dict(read_json(file)) if file.is_file() else {}
        if asked is not None:
            raw.pop("quantization_config", None)  # whatever it says
        config = ModelConfig.read(raw) if raw else ModelConfig.read(path)
    if asked is not None:
        return config, asked
    method = config.quantisation.method
    if method == "fp8":
        return config, WeightForm("fp8", quantisation=config.quantisation)
    packed = None if method == "none" else config.quantisation
    return config, WeightForm("f32" if raw.get("dtype") == "float32" else "bf16", quantisation=packed)


def _plan(invocation: Invocation) -> "Plan":
    from engine.model.stored import has_mtp_block
    from engine.plan import Ask, Boxes, WeightForm, make_plan
    from engine.plan.stages import KeyForm

    options, settings = invocation.options, invocation.settings
    model = settings.model or "glm-5.3"
    named = options.get("weights")
    if named is None and options.get("weight_group") is not None:
        raise BadSetting("--weight-group belongs to --weights int4, int8 or mix; give that too")
    asked = None if named is None else WeightForm(named, _count(options, "weight_group", 64))  # type: ignore[arg-type]  # it checks
    forms: dict[str, KeyForm] = {form: form for form in get_args(KeyForm)}
    keys = str(options.get("keys") or settings.engine.index_key_format)
    if keys not in forms:
        raise BadSetting(f"--index-key-format must be one of {', '.join(forms)}, not {keys!r}")
    replicas = str(options.get("replicas") or 1)
    if replicas not in ("1", "2"):
        raise BadSetting(f"--mirror-replicas must be 1 or 2, not {replicas!r}")
    cards = _count(options, "cards", 8)
    boxes = Boxes(
        nodes=_count({"nodes": options.get("machines")}, "nodes", 2), ram_bytes=_size(options, "ram", 1 << 40), cards=cards,
        card_bytes=_size(options, "vram", 48 << 30), cards_per_stage=_count(options, "cards_per_stage", 1 if cards % 2 else 2),
    )  # fmt: skip
    config, form = _config(model, asked)
    ask = Ask(
        tokens=tokens_of(str(options["context"])) if options.get("context") is not None else min(1 << 20, config.context_max),
        sessions=_count(options, "sessions", 15), form=form, mtp=has_mtp_block(config) and not options.get("without_mtp"),
        keys=forms[keys], replicas=int(replicas), arena_bytes=settings.engine.host_memory_bytes,
    )  # fmt: skip
    return make_plan(model, config, settings.engine, boxes, ask)


def report(plan: "Plan", console: Console, *, as_json: bool) -> None:
    """Print a plan."""
    from engine.plan import table

    if as_json:
        print(json.dumps(table.as_json(plan), indent=1), file=console.file)
        return
    for each in table.tables(plan):
        console.print(each)
    for line in table.verdict(plan):
        console.print(Text(line))


def run(invocation: Invocation) -> int:
    """Returns 0, or 4 when what was asked does not fit. Raises BadSetting, BadModel."""
    plan = _plan(invocation)
    console = results() if not invocation.options.get("json") else Console(file=sys.stdout)
    report(plan, console, as_json=bool(invocation.options.get("json")))
    return 0 if plan.fits else NotAdmitted.exit_code


COMMAND = Command("plan", "what fits on which machines and what binds first, from arithmetic alone", configure, run)
