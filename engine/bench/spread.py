"""How measured values are spread. Pure; imports nothing heavy."""

from collections.abc import Sequence

__all__ = ["percentile", "spread_of"]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def spread_of(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and the largest; None of no values."""
    if not values:
        return None
    named = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {"mean": sum(values) / len(values), **named, "max": max(values)}
