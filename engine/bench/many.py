"""What `forebay bench sessions` is asked, and what that will take, worked out before anything is loaded.

Holds the plan, its checks and its arithmetic. Runs nothing.

1. `rows` are what a session has in front of its new tokens: made-up ones and the prompt.
2. Without `--host-memory` the arena is exactly what the sessions reserve: registering more would only take longer.
3. What the machine's RAM cannot hold is refused before the weights are made, unless `--host-memory` gives a size: a virtual machine may
   have its RAM only as it is taken, and says less before. Then registering the arena is what refuses.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from rich.table import Table

from engine.bench.company import Lengths
from engine.bench.decode import check_placements
from engine.config import EngineConfig
from engine.device import device_of
from engine.errors import BadSetting, NotAdmitted
from engine.model.config import ModelConfig
from engine.model.named import NAMED
from engine.model.stored import has_mtp_block
from engine.plan.stages import Rules, SessionBytes
from engine.plan.table import size
from engine.plan.weights import WeightForm
from memory.host import available_bytes

__all__ = ["PARTS", "Found", "Part", "Piece", "SessionsPlan", "Work", "absolute", "prepared"]

Part: TypeAlias = Literal["decode", "resident", "footprint", "gap"]
PARTS: tuple[Part, ...] = get_args(Part)

_ROWS = 50_000
_COUNTS: dict[Part, tuple[int, ...]] = {"decode": (1, 2, 4, 8, 16), "resident": (10,), "footprint": (1,), "gap": (1,)}
_STREAM_TOKENS = 131_072
_USUAL_TOKENS = 256
_PROCESS_BYTES = 4 << 30  # of RAM beside the arena: interpreter, driver, token ids
_ARENA_BYTES = 64 << 20  # at least: warming up takes blocks too


@dataclass(frozen=True, slots=True)
class SessionsPlan:
    """What to run. Raises BadSetting naming the flag.

    sessions: how many decode at once, one run each (decode), or in each arm (resident); empty: the part's own. rows: of a session
    (footprint: each in turn); empty: the part's own. append_rows, append_after, usual_tokens: of the gap. limit_s: nothing more is begun
    after so long.
    """

    model: Path
    engine: EngineConfig
    part: Part = "decode"
    sessions: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    prompt_tokens: int = 64
    new_tokens: int = 1_024
    warmup_tokens: int = 16
    alone_tokens: int = 64
    placements: tuple[str, ...] = ("resident", "offload", "offload", "resident")
    append_rows: int = 0  # 0: as many as the context holds
    append_after: int = 0  # made-up rows that the appended session has before
    usual_tokens: int = _USUAL_TOKENS
    limit_s: float = 480.0

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise BadSetting(f"--part must be one of {', '.join(PARTS)}, not {self.part!r}")
        check_placements(self.placements)
        least = {
            "prompt_tokens": 1, "new_tokens": 8, "warmup_tokens": 2, "alone_tokens": 1, "append_rows": 0, "append_after": 0,
            "usual_tokens": 8,
        }  # fmt: skip
        for name, at_least in least.items():
            if getattr(self, name) < at_least:
                raise BadSetting(f"--{name.removesuffix('_rows').replace('_', '-')} must be at least {at_least}, not {getattr(self, name)}")
        for flag, values in (("sessions", self.sessions), ("rows", self.rows)):
            if any(value < 1 for value in values):
                raise BadSetting(f"--{flag} must be counts of at least 1, not {min(values)}")
        if (len(self.counts) > 1 and self.part != "decode") or (self.part in ("footprint", "gap") and self.counts != (1,)):
            raise BadSetting(f"--sessions: --part {self.part} runs {'one number of them' if self.part == 'resident' else 'one at a time'}")
        if len(self.rows) > 1 and self.part != "footprint":
            raise BadSetting(f"--rows: --part {self.part} takes one number")
        if self.append_after and self.part != "gap":
            raise BadSetting(f"--append-after is for --part gap: --part {self.part} appends nothing beside a stream")
        if self.alone_tokens > self.new_tokens:
            raise BadSetting(f"--alone-tokens {self.alone_tokens} is more than --new-tokens {self.new_tokens}")
        if self.limit_s <= 0:
            raise BadSetting(f"--limit must be more than 0 seconds, not {self.limit_s}")
        if self.engine.draft_depth != 0:
            raise BadSetting("bench sessions measures steps of one row and their floor: leave --draft-depth at 0; the gate measures drafts")

    @property
    def counts(self) -> tuple[int, ...]:
        """Sessions of each run."""
        return self.sessions or _COUNTS[self.part]


@dataclass(frozen=True, slots=True)
class Work:
    """A plan with every number filled in."""

    plan: SessionsPlan
    engine: EngineConfig
    lengths: tuple[Lengths, ...]  # one, or of the footprint one each
    append_tokens: int  # really read while a stream runs; 0 in the other parts
    session: tuple[SessionBytes, ...]  # of one session of each length; of the gap the stream's and the append's
    host_bytes: int  # of blocks that are held together
    device_bytes: int  # of sessions that are held together
    weights_bytes: int

    @property
    def appended_total(self) -> int:
        """Tokens that the session which is appended to may hold: made-up ones, those that are read, those behind them."""
        return self.plan.append_after + self.append_tokens + self.plan.alone_tokens

    def table(self) -> Table:
        """What this will hold."""
        drawn = Table(title=f"{self.plan.part}: what it will hold", title_justify="left")
        for title in ("tokens a session", "RAM", "device", "keys", "hot or resident rows", "maps", "ring", "tables"):
            drawn.add_column(title, justify="right")
        tokens = [each.total for each in self.lengths] + ([self.appended_total] if self.append_tokens else [])
        for count, each in zip(tokens, self.session, strict=True):
            parts = (each.host, each.card, each.keys, each.hot_rows + each.rows, each.maps, each.ring, each.tables)
            drawn.add_row(f"{count:,}", *map(size, parts))
        drawn.caption = (
            f"together {size(self.host_bytes)} of RAM, {size(self.device_bytes)} of the device beside {size(self.weights_bytes)}"
        )
        drawn.caption += f" of weights; arena {size(self.engine.host_memory_bytes)}"
        return drawn

    def fields(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "sessions": [dataclasses.asdict(each) for each in self.session], "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes, "weights_bytes": self.weights_bytes, "arena_bytes": self.engine.host_memory_bytes,
        }  # fmt: skip


class Found(Protocol):
    """What a part found."""

    complete: bool  # False: the time ran out, or something ended it, before all was run

    @property
    def trouble(self) -> str:
        """What makes its speed worth nothing, in one line; empty: nothing does."""
        ...

    def fields(self) -> dict[str, Any]:
        """JSON values; without any time while there is trouble, without absolute ones on a CPU."""
        ...

    def table(self) -> Table:
        """For people; as the fields."""
        ...

    def said(self) -> str:
        """One line under the table."""
        ...


Piece: TypeAlias = Callable[[Found], None]  # told after each measured piece: what there is so far


def prepared(plan: SessionsPlan) -> Work:
    """Fill the numbers in. Raises: BadSetting: more than the model's context; NotAdmitted: more than the RAM there is; BadModel."""
    named = None if plan.model.exists() else NAMED.get(str(plan.model))
    config = ModelConfig.read(named if named is not None else plan.model)
    context = min(plan.engine.context_max or config.context_max, config.context_max)
    lengths = tuple(_lengths(plan, rows, context) for rows in _rows(plan, context))
    append = _append(plan, context) if plan.part == "gap" else 0
    device = device_of(plan.engine)
    most = max(plan.counts)
    engine = dataclasses.replace(
        plan.engine, decode_batch_limit=max(most, plan.engine.decode_batch_limit), sessions_max=max(most, plan.engine.sessions_max)
    )
    offload = dataclasses.replace(engine, placement="offload")
    form = WeightForm("f32" if device.type == "cpu" else "bf16")
    rules = Rules(config, offload, form, has_mtp_block(config), 1, engine.index_key_format)
    layout = rules.layout(range(config.layers))
    tokens = [each.total for each in lengths] + ([plan.append_after + append + plan.alone_tokens] if append else [])
    session = tuple(rules.session(layout, each) for each in tokens)
    together = [most * each.host for each in session], [most * each.card for each in session]
    host, card = (sum(each) if plan.part == "gap" else max(each) for each in together)
    arena = engine.host_memory_bytes or max(_ARENA_BYTES, host)
    fewer = "--append, --append-after or --rows" if plan.part == "gap" else "--sessions or --rows"
    if host > arena:
        raise NotAdmitted(
            f"these sessions need an arena of {size(host)} and --host-memory gives {size(arena)}; raise it, or ask for fewer {fewer}"
        )
    if not engine.host_memory_bytes:
        _check_ram(arena, fewer)
    return Work(
        plan, dataclasses.replace(engine, host_memory_bytes=arena), lengths, append, session, host, card,
        rules.stage_weights(range(config.layers)).card,
    )  # fmt: skip


def _rows(plan: SessionsPlan, context: int) -> tuple[int, ...]:
    if plan.rows:
        return plan.rows
    whole = context - plan.new_tokens
    if plan.part == "decode":
        return (whole,)
    return (min(_ROWS, whole), whole) if plan.part == "footprint" else (min(_ROWS, whole),)


def _lengths(plan: SessionsPlan, rows: int, context: int) -> Lengths:
    new = plan.new_tokens
    if plan.part == "gap":
        new = max(plan.usual_tokens + 1, min(_STREAM_TOKENS, context - rows))
    if rows <= plan.prompt_tokens:
        raise BadSetting(f"--rows {rows} must be more than --prompt-tokens {plan.prompt_tokens}, which are among them")
    if rows + new > context:
        raise BadSetting(f"--rows {rows} and {new} new tokens are more than the context of {context} tokens")
    return Lengths(rows - plan.prompt_tokens, plan.prompt_tokens, new, plan.warmup_tokens)


def _append(plan: SessionsPlan, context: int) -> int:
    """Ids that are appended. Raises BadSetting."""
    before, behind = plan.append_after, plan.alone_tokens
    room = context - before - behind
    if room < 1:
        raise BadSetting(
            f"--append-after {before} and {behind} tokens at the end leave nothing to append of the context of {context} tokens; "
            f"--append-after may be {max(0, room + before - 1)} at most"
        )
    if plan.append_rows > room:
        made_up = f"--append-after {before}, " if before else ""
        raise BadSetting(
            f"{made_up}--append {plan.append_rows} and {behind} tokens behind it are more than the context of {context} tokens; "
            f"--append may be {room} at most"
        )
    return plan.append_rows or room


def _check_ram(arena_bytes: int, fewer: str) -> None:
    try:
        free = available_bytes()
    except OSError:
        return
    if arena_bytes + _PROCESS_BYTES > free:
        raise NotAdmitted(
            f"these sessions need an arena of {size(arena_bytes)}, and with {size(_PROCESS_BYTES)} for the process that is more than the "
            f"{size(free)} of RAM that are free; ask for fewer {fewer}, or give --host-memory where RAM grows as it is taken"
        )


def absolute(config: EngineConfig) -> bool:
    """Whether times mean anything by themselves: not on a CPU, which others share."""
    return device_of(config).type != "cpu"
