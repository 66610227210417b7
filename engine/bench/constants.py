"""Constants of kernels that are no products, tried in place: which of several settings of a module is fastest over a few cases.

A setting changes a module's constants while its cases run and puts them back.

Invariants:
1. A case that is wrong under a setting has no time there.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from engine.bench.cases import Case
from engine.bench.timing import Timer

__all__ = ["SETTINGS", "Setting", "Tried", "as_json", "set_to", "table", "try_settings"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Constants of one module, and which cases they are tried on."""

    module: str
    values: Mapping[str, int]
    cases: tuple[str, ...]  # parts of names


def _each(module: str, names: tuple[str, ...], rows: Sequence[tuple[int, ...]], cases: tuple[str, ...]) -> list[Setting]:
    return [Setting(module, dict(zip(names, row, strict=True)), cases) for row in rows]


_ATTEND = tuple(f"rows compact, {rows} rows" for rows in (1, 4, 16))
SETTINGS: list[Setting] = [
    *_each(
        "kernels.sparse_mla.kernel", ("SPLIT_PICKS", "TILE_HEADS", "WARPS", "HELD"),
        ((64, 64, 4, 1), (64, 64, 8, 1), (32, 64, 4, 1), (64, 64, 4, 0), (64, 64, 8, 0), (128, 64, 8, 0), (128, 64, 4, 0), (32, 64, 4, 0),
         (64, 16, 4, 0), (128, 16, 4, 0), (64, 32, 4, 0), (128, 32, 4, 0), (256, 64, 8, 0), (128, 32, 8, 0), (256, 16, 8, 0)),
        _ATTEND,
    ),
    *_each(
        "kernels.index_score.kernel", ("BLOCK_KEYS", "STAGES", "PROGRAMS", "WARPS"),
        ((64, 3, 528, 4), (64, 4, 528, 4), (64, 5, 528, 4), (64, 4, 396, 4), (64, 6, 264, 4), (64, 4, 792, 4), (64, 3, 1056, 4),
         (128, 3, 264, 4), (128, 3, 396, 4), (128, 4, 264, 4), (128, 3, 264, 8), (128, 4, 264, 8), (256, 3, 132, 8)),
        ("score 1,048,576 keys",),
    ),
    *_each(
        "kernels.index_score.kernel", ("BLOCK_KEYS", "SCALED_STAGES", "SCALED_PROGRAMS", "WARPS"),
        ((64, 12, 528, 4), (64, 8, 528, 4), (64, 6, 528, 4), (64, 8, 660, 4), (64, 6, 792, 4), (64, 10, 396, 4), (64, 12, 264, 4),
         (64, 16, 264, 4), (64, 20, 264, 4), (128, 8, 264, 4), (128, 8, 528, 4), (128, 12, 264, 8), (128, 8, 264, 8), (128, 8, 528, 8),
         (256, 6, 264, 8)),
        ("e4m3 keys",),
    ),
    *_each(
        "kernels.select.kernel", ("CHUNK", "WARPS"),
        ((4096, 8), (2048, 4), (2048, 8), (4096, 4), (4096, 16), (8192, 8), (8192, 16), (1024, 4)),
        ("select",),
    ),
]  # fmt: skip


@contextmanager
def set_to(setting: Setting) -> Iterator[None]:
    """Have a module use these constants."""
    module = importlib.import_module(setting.module)
    before = {name: getattr(module, name) for name in setting.values}
    for name, value in setting.values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting's times by case; NaN where it was wrong or would not run."""

    setting: Setting
    microseconds: dict[str, float]
    failure: str


def try_settings(
    settings: Sequence[Setting], cases: Sequence[Case], device: torch.device, timer: Timer,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Tried]:  # fmt: skip
    """Check and time every setting on its cases."""
    for number, setting in enumerate(settings):
        times: dict[str, float] = {}
        failure = ""
        for case in cases:
            if not any(part in case.name for part in setting.cases):
                continue
            times[case.name] = math.nan
            try:
                with set_to(setting):
                    made = case.make(device)
                    difference = made.difference()
                    if math.isnan(difference) or difference > case.bound:
                        failure = f"{case.name} differs by {difference:.2e}"
                        continue
                    times[case.name] = timer.microseconds(made.calls)
            except Exception as error:  # too much shared memory, say, or no compilation: a fact about the setting
                failure = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        yield Tried(setting, times, failure)
        on_done(number + 1, len(settings))


def table(found: Sequence[Tried]) -> Table:
    """For people: every setting."""
    shown = Table("module", "constants", "us by case", "failure", title="settings", title_justify="left")
    for one in found:
        values = ", ".join(f"{name} {value}" for name, value in one.setting.values.items())
        times = "; ".join(f"{name}: {time:.2f}" for name, time in one.microseconds.items())
        shown.add_row(one.setting.module, values, times, one.failure)
    return shown


def as_json(found: Sequence[Tried]) -> list[dict[str, Any]]:
    """For programs."""
    return [
        {
            "module": one.setting.module,
            "constants": dict(one.setting.values),
            "us": {name: None if math.isnan(time) else time for name, time in one.microseconds.items()},
            "failure": one.failure,
        }
        for one in found
    ]
