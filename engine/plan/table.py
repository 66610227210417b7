"""A plan for people (rich tables and a verdict in sentences) and as JSON.

Knows no arithmetic but sums and differences of what a `Plan` says.
"""

from typing import Any

from rich.table import Table

from engine.plan.capacity import Plan
from engine.plan.stages import SessionBytes, StagePlan

__all__ = ["as_json", "tables", "verdict"]

VERSION = 1


def size(size_bytes: int) -> str:
    """`1,499.06 GiB`; MiB and KiB for what is small."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:,.2f} {name}"
    return f"{size_bytes} B"


def tables(plan: Plan) -> list[Table]:
    """Cards, a session's parts on them, and nodes."""
    return [_cards(plan), _parts(plan), _nodes(plan)]


def _titled(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _cards(plan: Plan) -> Table:
    boxes, sessions = plan.boxes, plan.ask.sessions
    kept = boxes.card_bytes - boxes.usable_card_bytes
    table = _titled(
        f"each card: {size(boxes.card_bytes)} less {size(kept)} for activations",
        "stage", "node", "layers", "weights", "append ring", "a session", f"{sessions} sessions", "left", "sessions at most",
    )  # fmt: skip
    for number, stage in enumerate(plan.stages):
        held = sessions * stage.session.card
        left = boxes.usable_card_bytes - stage.fixed - held
        table.add_row(
            str(number), str(stage.node), _layers(stage), size(stage.weights.card), size(stage.append_ring), size(stage.session.card),
            size(held), size(left), f"{plan.binds[number].sessions:,}",
        )  # fmt: skip
    return table


def _layers(stage: StagePlan) -> str:
    return f"{stage.layers.start} to {stage.layers.stop - 1}" + (" + MTP" if stage.mtp else "")


def _parts(plan: Plan) -> Table:
    """What one session takes of each card."""
    columns = ("index keys", "hot rows", "slot maps", "ring", "resident rows", "tables")
    table = _titled(f"one session of {plan.ask.tokens:,} tokens on each card", "stage", *columns)
    for number, stage in enumerate(plan.stages):
        each = stage.session
        table.add_row(str(number), *map(size, (each.keys, each.hot_rows, each.maps, each.ring, each.rows, each.tables)))
    return table


def _nodes(plan: Plan) -> Table:
    sessions = plan.ask.sessions
    table = _titled(
        f"each node's RAM: {size(plan.boxes.ram_bytes)}",
        "node", "for histories", "rows a session", "keys a session", f"{sessions} sessions", "left", "sessions at most",
    )  # fmt: skip
    for node, bind in zip(plan.nodes, plan.binds[len(plan.stages) :], strict=True):
        held = sessions * node.session_bytes
        most = f"{bind.sessions:,}" if node.session_bytes else "any"
        table.add_row(
            str(node.node), size(node.arena_bytes), size(node.session_rows), size(node.session_keys), size(held),
            size(node.arena_bytes - held), most,
        )  # fmt: skip
    return table


def verdict(plan: Plan) -> list[str]:
    """What fits and what binds first, a sentence a line."""
    ask, boxes, first = plan.ask, plan.boxes, plan.first
    block = "" if ask.mtp else " without the MTP block"
    lines = [
        f"{plan.model}: {size(plan.checkpoint_bytes)} of {ask.form.named} weights{block}, rows of {plan.row_bytes} bytes, keys of "
        f"{plan.key_bytes}, {plan.placement}, on {boxes.nodes} x {boxes.cards} cards, {boxes.cards_per_stage} a stage"
    ]
    lines.append(f"a history of {ask.tokens:,} tokens is {size(plan.history_bytes)} of packed rows in all layers")
    if first.what == "weights":
        lines.append(
            f"the weights alone do not fit: {first.where} has {size(boxes.usable_card_bytes)} for them and "
            f"{size(-first.room_bytes)} are missing; use smaller weights, more cards or larger ones"
        )
        return lines + list(plan.notes)
    lines.append(
        f"{ask.sessions:,} sessions of {ask.tokens:,} tokens {'fit' if plan.fits else 'do NOT fit'}; at most {plan.sessions_max:,} do, "
        f"resident {plan.resident_sessions:,}"
    )
    lines.append(f"binds first: {first.what} of {first.where} ({size(first.room_bytes)} for sessions of {size(first.session_bytes)})")
    longest = f"may have {plan.tokens_max:,} tokens each" if plan.tokens_max else "have no room at all"
    lines.append(f"{ask.sessions:,} sessions {longest}")
    return lines + list(plan.notes)


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it, in bytes."""
    boxes, ask, first = plan.boxes, plan.ask, plan.first
    return {
        "version": VERSION,
        "kind": "plan",
        "model": plan.model,
        "asked": {
            "tokens": ask.tokens, "sessions": ask.sessions, "weights": ask.form.named, "weight_group": ask.form.group, "mtp": ask.mtp,
            "index_keys": ask.keys, "mirror_replicas": ask.replicas, "placement": plan.placement, "hot_rows": plan.hot_rows,
        },
        "boxes": {
            "nodes": boxes.nodes, "ram_bytes": boxes.ram_bytes, "cards": boxes.cards, "card_bytes": boxes.card_bytes,
            "usable_card_bytes": boxes.usable_card_bytes, "cards_per_stage": boxes.cards_per_stage,
        },
        "row_bytes": plan.row_bytes,
        "key_bytes": plan.key_bytes,
        "history_bytes": plan.history_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "stages": [_stage(plan, number) for number in range(len(plan.stages))],
        "nodes": [
            {"node": node.node, "arena_bytes": node.arena_bytes, "session_row_bytes": node.session_rows,
             "session_key_bytes": node.session_keys, "sessions_max": bind.sessions if node.session_bytes else None}
            for node, bind in zip(plan.nodes, plan.binds[len(plan.stages) :], strict=True)
        ],
        "fits": plan.fits,
        "sessions_max": plan.sessions_max,
        "resident_sessions_max": plan.resident_sessions,
        "tokens_max": plan.tokens_max,
        "binds_first": {
            "what": first.what, "where": first.where, "room_bytes": first.room_bytes, "session_bytes": first.session_bytes,
        },
        "notes": list(plan.notes),
    }  # fmt: skip


def _stage(plan: Plan, number: int) -> dict[str, Any]:
    stage = plan.stages[number]
    return {
        "node": stage.node,
        "first_layer": stage.layers.start,
        "layers": len(stage.layers),
        "mtp": stage.mtp,
        "weight_bytes": stage.weights.card,
        "append_ring_bytes": stage.append_ring,
        "session": _session(stage.session),
        "sessions_max": plan.binds[number].sessions,
    }


def _session(session: SessionBytes) -> dict[str, int]:
    return {
        "card_bytes": session.card, "key_bytes": session.keys, "hot_row_bytes": session.hot_rows, "map_bytes": session.maps,
        "ring_bytes": session.ring, "resident_row_bytes": session.rows, "table_bytes": session.tables,
        "host_bytes": session.host,
    }  # fmt: skip
