"""Device memory of a session at one length and another: its packed rows must take the same bytes at both.

One session after another in one engine, closed before the next. Times nothing, prints and writes nothing.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from engine.bench.arm import Watch, forget_engines
from engine.bench.company import fill
from engine.bench.holdings import Parts, device_bytes, parts_of
from engine.bench.many import Piece, Work
from engine.engine import Engine
from engine.plan.table import size

__all__ = ["Footprint", "run_footprint"]


@dataclass(frozen=True, slots=True)
class _Look:
    """One session that has decoded. `owners`: what the ledger's owners got with it; `allocator`: what the device's allocator did."""

    rows: int
    parts: Parts
    owners: dict[str, int]
    allocator: int | None


@dataclass(slots=True)
class Footprint:
    """A look at each length so far."""

    work: Work
    complete: bool = False
    looks: list[_Look] = field(default_factory=list)

    @property
    def trouble(self) -> str:
        """See Found. Histories shorter than the hot cache may take less."""
        rows = {(look.parts.rows, look.parts.ring) for look in self.looks}
        return "" if len(rows) < 2 else f"packed rows and ring take {', '.join(f'{one:,} + {ring:,}' for one, ring in sorted(rows))} bytes"

    def fields(self) -> dict[str, Any]:
        """See Found."""
        return {"looks": [asdict(look) for look in self.looks], "rows_constant": not self.trouble}

    def table(self) -> Table:
        """See Found."""
        drawn = Table(title=f"one session on the device, --hot-rows {self.work.engine.hot_rows or 'auto'}", title_justify="left")
        for title in ("rows", "packed rows", "ring", "slot maps", "index keys", "tables", "allocator"):
            drawn.add_column(title, justify="right")
        for look in self.looks:
            parts = look.parts
            cells = [f"{parts.rows:,}", *map(size, (parts.ring, parts.maps, parts.keys, parts.tables))]
            drawn.add_row(f"{look.rows:,}", *cells, "-" if look.allocator is None else size(look.allocator))
        return drawn

    def said(self) -> str:
        """See Found."""
        return f"packed rows take the same {self.looks[0].parts.rows:,} bytes at {len(self.looks)} lengths" if self.looks else "no length"


async def run_footprint(work: Work, watch: Watch, piece: Piece) -> Footprint:
    """Each length. Raises ForebayError."""
    found = Footprint(work)
    try:
        async with Engine.open(work.plan.model, work.engine, progress=lambda done, total: watch("loading", done, total)) as engine:
            for lengths in work.lengths:
                before, held = device_bytes(engine), _allocated(engine)
                fleet = await fill(engine, lengths, 1, watch)
                await fleet.turn((0,), work.plan.alone_tokens, f"{lengths.history:,} rows: decoding", watch)
                after, holds = device_bytes(engine), _allocated(engine)
                owners = {owner: count - before.get(owner, 0) for owner, count in after.items() if count != before.get(owner, 0)}
                allocator = None if held is None or holds is None else holds - held
                found.looks.append(_Look(lengths.history + lengths.prompt, parts_of(engine, fleet.ids[0]), owners, allocator))
                await fleet.close()
                await engine.stage.streams.idle()
                piece(found)
    finally:
        await forget_engines(work.engine)
    found.complete = True
    return found


def _allocated(engine: Engine) -> int | None:
    return None if engine.stage.device.type == "cpu" else torch.cuda.memory_allocated(engine.stage.device)
