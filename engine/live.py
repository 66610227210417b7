"""What the page is shown, once a second: counts, memory, sessions with their tiers, and what the streams did since.

Values for one watcher, as one JSON object a snapshot. Knows no HTTP.

1. Nothing is gathered while nobody watches.
2. A snapshot is bounded: sessions beyond `SESSIONS_MAX` are counted and not listed.
3. Of sessions of another key nothing is told but their share of the sums.
"""

import time
from typing import Any, Final

from engine import api
from engine.measures import ActivityFace, Measures, SessionTiers
from engine.service import Service

__all__ = ["EVERY_S", "SESSIONS_MAX", "snapshot"]

EVERY_S: Final = 1.0
SESSIONS_MAX: Final = 100


def snapshot(service: Service, activity: ActivityFace | None, namespace: str) -> bytes:
    """One JSON object. Args: activity: what the streams did; None: no engine is open. namespace: whose sessions are listed."""
    shown: dict[str, Any] = {
        "at": round(time.time() * 1000),
        "uptime_s": round(time.time() - service.created, 1),
        "state": service.state,
        "loop_lag_ms": round(service.metrics.lag.recent_s * 1000, 2),
    }
    engine = service.engine
    if engine is not None and activity is not None:
        found = engine.instruments.measures()
        shown |= {
            "engine": {
                "model": engine.model_name, "context_max": engine.context_max, "placement": engine.config.placement,
                "decode_batch_limit": engine.config.decode_batch_limit,
            },
            "counts": _counts(found),
            "memory": _memory(found),
            "sessions": [_session(one) for one in engine.instruments.tiers(namespace, SESSIONS_MAX)],
            "streams": _streams(found, activity),
        }  # fmt: skip
    return api.encode(shown)


def _counts(found: Measures) -> dict[str, Any]:
    return {
        "waiting": found.waiting, "appending": found.appending, "decoding": found.decoding, "sessions": found.sessions,
        "steps": found.steps, "prompt_tokens": found.tokens.prompt, "cached_tokens": found.tokens.cached,
        "generated_tokens": found.tokens.generated, "hits": found.hits, "misses": found.misses, "ring_reads": found.ring_reads,
        "drafts_proposed": sum(found.drafts_proposed), "drafts_accepted": sum(found.drafts_accepted),
        "gaps": sum(found.waits.counts), "gaps_s": round(found.waits.sum_s, 6), "stalls": found.stalls,
        "lag_rows": found.lag_rows,
    }  # fmt: skip


def _memory(found: Measures) -> dict[str, Any]:
    return {
        "arena": {"total": found.arena.total_bytes, "used": found.arena.used_bytes, "reserved": found.arena.reserved_bytes},
        "device": {"budget": found.device_budget_bytes, "held": found.held_bytes.get("device", {})},
        "rows": {"ram": found.mirrored_rows, "hot": found.hot_rows, "ring": found.ring_rows},
    }


def _session(one: SessionTiers) -> dict[str, Any]:
    return {
        "id": one.id, "kind": one.kind, "phase": one.phase, "tokens": one.tokens, "rows": one.rows, "ram": one.mirrored_rows,
        "ring": one.ring_rows, "ring_max": one.ring_rows_max, "hot": one.hot_rows, "hot_max": one.hot_rows_max,
        "blocks": one.blocks, "block_rows": one.block_rows, "host_bytes": one.host_bytes, "device_bytes": one.device_bytes,
        "prompt_rows": one.prompt_rows, "prompt_total": one.prompt_rows_total, "generated": one.generated,
    }  # fmt: skip


def _streams(found: Measures, activity: ActivityFace) -> dict[str, Any]:
    """By stream: the percentages of its bins since the last snapshot, seconds by kind, and its counts."""
    seen = {lane.stream: lane for lane in activity.take()}
    lanes = []
    for counts in found.streams:
        lane = seen.get(counts.name)
        lanes.append(
            {
                "name": counts.name, "operations": counts.operations, "bytes": counts.payload_bytes, "busy_s": round(counts.busy_s, 6),
                "in_flight": counts.in_flight, "busy": [] if lane is None else lane.busy,
                "kinds": {} if lane is None else {kind: round(spent, 4) for kind, spent in list(lane.kinds.items())[:4]},
            }
        )  # fmt: skip
    return {"bin_ms": activity.bin_ms, "lanes": lanes}
