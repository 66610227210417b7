"""Times of single operations: correct first, then as many launches as fill a graph, against bytes and the copy bandwidth.

Invariants:
1. A case that differs from its reference by more than its bound has no time, and the run fails.
2. Bandwidth is measured in the same process; a share is bytes a second over it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from engine.bench.attention import attention_cases
from engine.bench.cases import Case, Shapes
from engine.bench.chain import chain_cases
from engine.bench.integers import integer_cases
from engine.bench.products import product_cases
from engine.bench.timing import Timer
from engine.errors import BadSetting
from kernels.empty import empty

__all__ = ["Measured", "all_cases", "as_json", "chosen", "launch_us", "measure", "needs_device", "table"]

EMPTY_LAUNCHES = 100


@dataclass(frozen=True, slots=True)
class Measured:
    """One case's result. `microseconds` is None when its output was wrong."""

    group: str
    name: str
    bytes: int
    difference: float
    bound: float
    microseconds: float | None
    launches: int | None
    target_us: float | None
    target_share: float | None
    facts: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Whether the output was within the bound; NaN is not."""
        return self.difference <= self.bound

    def share(self, bandwidth: float) -> float | None:
        """Of the copy bandwidth, in bytes a second."""
        return None if self.microseconds is None else self.bytes / (self.microseconds * 1e-6) / bandwidth

    def reached(self, bandwidth: float) -> bool | None:
        """Whether the target was met; None without one."""
        if self.microseconds is None or (self.target_us is None and self.target_share is None):
            return None
        if self.target_us is not None:
            return self.microseconds <= self.target_us
        return (self.share(bandwidth) or 0.0) >= (self.target_share or 0.0)


def needs_device() -> torch.device:
    """The card. Raises BadSetting where there is none."""
    if not torch.cuda.is_available():
        raise BadSetting("single kernels are timed on a device; this machine shows none to torch")
    return torch.device("cuda")


def all_cases(shapes: Shapes) -> list[Case]:
    """Everything that is measured."""
    return product_cases(shapes) + integer_cases(shapes) + attention_cases(shapes) + chain_cases(shapes)


def chosen(cases: Sequence[Case], only: str | None) -> list[Case]:
    """Cases whose group or name holds one of the words of `only`, separated by commas. Raises BadSetting when none does."""
    if only is None:
        return list(cases)
    words = [word.strip() for word in only.split(",") if word.strip()]
    found = [case for case in cases if any(word in f"{case.group} {case.name}" for word in words)]
    if not found:
        raise BadSetting(f"--only {only} names no case; groups are {', '.join(sorted({case.group for case in cases}))}")
    return found


def measure(
    cases: Sequence[Case], device: torch.device, timer: Timer, on_done: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Measured]:
    """Make, check and time one case after the other; a case's memory is given back before the next."""
    for number, case in enumerate(cases):
        made = case.make(device)
        difference = made.difference()
        right = not math.isnan(difference) and difference <= case.bound
        microseconds = timer.microseconds(made.calls) if right else None
        launches = timer.launches(made.calls[0]) if right else None
        del made
        yield Measured(
            case.group, case.name, case.bytes, difference, case.bound, microseconds, launches, case.target_us, case.target_share, case.facts
        )
        on_done(number + 1, len(cases))


def launch_us(device: torch.device, timer: Timer) -> float:
    """What a launch that does nothing takes, one behind the other."""
    tensor = torch.zeros(1, dtype=torch.uint8, device=device)
    return timer.microseconds([lambda: empty(tensor, 132)] * EMPTY_LAUNCHES)


def table(found: Sequence[Measured], bandwidth: float, launch: float) -> Table:
    """For people: times against bytes and targets."""
    title = f"kernels: copy bandwidth {bandwidth / 1e12:.2f} TB/s, an empty launch {launch:.2f} us"
    shown = Table(title=title, title_justify="left")
    for name in ("operation", "bytes", "us", "of copy", "launches", "difference", "target", ""):
        shown.add_column(name, justify="left" if name == "operation" else "right")
    for one in found:
        share, reached = one.share(bandwidth), one.reached(bandwidth)
        target = f"{one.target_us:.0f} us" if one.target_us is not None else f"{one.target_share:.0%}" if one.target_share else ""
        verdict = "[bold red]WRONG[/]" if not one.equal else "" if reached is None else "[green]yes[/]" if reached else "[yellow]no[/]"
        shown.add_row(
            f"{one.group}: {one.name}",
            f"{one.bytes:,}",
            "" if one.microseconds is None else f"{one.microseconds:.2f}",
            "" if share is None else f"{share:.0%}",
            "" if one.launches is None else str(one.launches),
            f"{one.difference:.1e}",
            target,
            verdict,
        )
    return shown


def as_json(found: Sequence[Measured], bandwidth: float, launch: float, machine: dict[str, Any]) -> dict[str, Any]:
    """For programs."""
    rows = [
        asdict(one) | {"share": one.share(bandwidth), "reached": one.reached(bandwidth), "equal": one.equal} for one in found
    ]  # a difference may be NaN, which JSON has not
    for row in rows:
        row["difference"] = None if math.isnan(row["difference"]) else row["difference"]
    return {
        "version": 1, "kind": "kernels", "machine": machine, "copy_bytes_per_second": bandwidth, "empty_launch_us": launch,
        "cases": rows,
    }  # fmt: skip
