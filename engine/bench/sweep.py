"""Tilings tried at each weight's shape: which one is fastest. The winners become constants by shape.

Compilation is most of a sweep: processes of their own compile first, into Triton's cache on disk; then one process takes times.

Invariants:
1. What is right is timed, at every row count by the same tiling: the choice follows the shape alone.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from rich.table import Table

from engine.bench.cases import Case, Shapes
from engine.bench.constants import SETTINGS, Setting, set_to
from engine.bench.integers import INTEGER_LINEAR, integer_linear_case, integer_mlp_case, integer_routed_case, integer_tilings
from engine.bench.kernels import all_cases
from engine.bench.products import LINEAR_NAMES, linear_case, linear_shape, mlp_case, routed_case
from engine.bench.timing import Timer
from kernels.linear.tiling import Tiling

__all__ = ["Swept", "Trial", "as_json", "best", "compile_ahead", "constants", "named", "named_settings", "sweep", "table", "trials"]

SWEPT_ROWS = (4,)
# outputs, width of a part, parts, warps, stages
_TILES = (
    (16, 64, 4, 4, 6), (16, 64, 4, 4, 4), (16, 128, 4, 4, 3), (16, 64, 8, 8, 4), (16, 64, 8, 8, 3), (16, 32, 8, 8, 7), (16, 32, 16, 16, 4),
    (16, 64, 16, 16, 2), (16, 64, 2, 2, 8), (16, 128, 4, 8, 3), (16, 32, 16, 8, 4), (16, 64, 8, 4, 3), (16, 64, 4, 8, 5),
    (32, 64, 4, 4, 3), (32, 64, 4, 4, 5), (32, 64, 2, 4, 6), (32, 64, 8, 8, 3), (32, 128, 2, 4, 4), (32, 64, 4, 8, 4), (32, 128, 4, 8, 3),
    (32, 32, 8, 8, 5), (32, 64, 1, 2, 6), (32, 64, 2, 2, 4),
    (64, 64, 2, 4, 5), (64, 64, 2, 4, 4), (64, 128, 1, 4, 4), (64, 64, 1, 4, 7), (64, 64, 1, 4, 4), (64, 64, 4, 8, 3), (64, 64, 2, 8, 5),
    (64, 64, 1, 2, 4), (128, 64, 1, 4, 5), (128, 64, 1, 4, 3), (128, 64, 1, 8, 5), (128, 64, 2, 8, 3),
)  # fmt: skip
_GATED_TILES = (
    (16, 64, 4, 4, 5), (16, 64, 4, 4, 4), (16, 64, 4, 4, 3), (16, 128, 2, 4, 4), (16, 64, 2, 2, 6), (16, 64, 2, 4, 6), (16, 64, 4, 8, 4),
    (16, 128, 4, 8, 3), (8, 64, 4, 4, 6), (8, 128, 4, 4, 4), (8, 64, 8, 8, 4), (32, 64, 2, 4, 5), (32, 64, 2, 4, 4), (32, 128, 1, 4, 4),
    (32, 64, 4, 8, 3), (32, 64, 1, 4, 7), (64, 64, 1, 4, 5), (64, 64, 1, 8, 5), (64, 128, 1, 8, 3),
)  # fmt: skip
_SPLIT_TILES = ((64, 128, 1, 4, 3), (32, 128, 1, 4, 4), (64, 64, 2, 4, 4))


@dataclass(frozen=True, slots=True)
class Trial:
    """One tiling at one weight: `make` gives the case of a number of rows."""

    weight: str
    outputs: int
    width: int
    tiling: Tiling
    make: Callable[[int], Case]


def _candidates(heads: int, outputs: int, width: int) -> Iterator[Tiling]:
    """Tilings that make sense for a shape: a step no wider than the weight, programs neither too few nor absurdly many."""
    for tile, part, parts, warps, stages in _TILES:
        if part * parts <= max(64, width) * 1.4 and tile <= 2 * outputs and heads * outputs / tile < 12_000:
            yield Tiling(tile, part, parts, warps, stages)
    for tile, part, parts, warps, stages in _SPLIT_TILES:
        steps, tiles = -(-width // (part * parts)), heads * -(-outputs // tile)
        for programs in (264, 528):
            splits = max((n for n in range(1, max(2, steps // 2)) if steps % n == 0 and n * tiles <= programs), default=1)
            if splits > 1:
                yield Tiling(tile, part, parts, warps, stages, splits)


def _linear(shapes: Shapes, name: str, tiling: Tiling, rows: int) -> Case:
    return linear_case(shapes, name, rows, tiling)


def _gated(shapes: Shapes, name: str, width: int, tiling: Tiling, rows: int) -> Case:
    return mlp_case(shapes, name, width, rows, (tiling, None))


def _down(shapes: Shapes, name: str, width: int, tiling: Tiling, rows: int) -> Case:
    return mlp_case(shapes, name, width, rows, (None, tiling))


def _routed(shapes: Shapes, gated: bool, tiling: Tiling, rows: int) -> Case:
    return routed_case(shapes, rows, (tiling, None) if gated else (None, tiling))


def _integer_linear(shapes: Shapes, name: str, bits: int, tiling: Tiling, rows: int) -> Case:
    return integer_linear_case(shapes, name, bits, rows, tiling)


def _integer_mlp(shapes: Shapes, name: str, width: int, bits: int, gated: bool, tiling: Tiling, rows: int) -> Case:
    return integer_mlp_case(shapes, name, width, bits, rows, (tiling, None) if gated else (None, tiling))


def _integer_routed(shapes: Shapes, bits: int, gated: bool, tiling: Tiling, rows: int) -> Case:
    return integer_routed_case(shapes, bits, rows, (tiling, None) if gated else (None, tiling))


def _integer_trials(shapes: Shapes) -> list[Trial]:
    """Tilings of weights of 4 and 8 bits."""
    found, hidden, width = [], shapes.hidden, shapes.expert_width
    for bits in (4, 8):
        for name in INTEGER_LINEAR:
            _, outputs, inputs = linear_shape(shapes, name)
            for how in integer_tilings(outputs, inputs, bits, gated=False):
                found.append(Trial(f"int{bits} {name}", outputs, inputs, how, partial(_integer_linear, shapes, name, bits, how)))
        for name, wide in (("dense", shapes.dense_width), ("shared", width)):
            for how in integer_tilings(wide, hidden, bits, gated=True):
                make = partial(_integer_mlp, shapes, name, wide, bits, True, how)
                found.append(Trial(f"int{bits} {name} gate, up", wide, hidden, how, make))
            for how in integer_tilings(hidden, wide, bits, gated=False):
                make = partial(_integer_mlp, shapes, name, wide, bits, False, how)
                found.append(Trial(f"int{bits} {name} down", hidden, wide, how, make))
        read = shapes.experts_per_token
        for how in integer_tilings(width, hidden, bits, gated=True, experts_read=read):
            found.append(Trial(f"int{bits} routed gate, up", width, hidden, how, partial(_integer_routed, shapes, bits, True, how)))
        for how in integer_tilings(hidden, width, bits, gated=False, experts_read=read):
            found.append(Trial(f"int{bits} routed down", hidden, width, how, partial(_integer_routed, shapes, bits, False, how)))
    return found


def trials(shapes: Shapes) -> list[Trial]:
    """Everything to try."""
    found = _integer_trials(shapes)
    for name in LINEAR_NAMES:
        heads, outputs, width = linear_shape(shapes, name)
        tilings = dict.fromkeys(_candidates(heads, outputs, width))
        found += [Trial(name, outputs, width, tiling, partial(_linear, shapes, name, tiling)) for tiling in tilings]
    hidden = shapes.hidden
    for name, width in (("dense", shapes.dense_width), ("shared", shapes.expert_width)):
        both = [Tiling(*tile) for tile in _GATED_TILES]
        found += [Trial(f"{name} gate, up", width, hidden, tiling, partial(_gated, shapes, name, width, tiling)) for tiling in both]
        single = dict.fromkeys(_candidates(1, hidden, width))
        found += [Trial(f"{name} down", hidden, width, tiling, partial(_down, shapes, name, width, tiling)) for tiling in single]
    width = shapes.expert_width
    found += [
        Trial("routed gate, up", width, hidden, Tiling(*tile), partial(_routed, shapes, True, Tiling(*tile))) for tile in _GATED_TILES
    ]
    unsplit = [tiling for tiling in dict.fromkeys(_candidates(8, hidden, width)) if tiling.splits == 1]
    return found + [Trial("routed down", hidden, width, tiling, partial(_routed, shapes, False, tiling)) for tiling in unsplit]


def _run_once(make: Callable[[], Case], setting: Setting | None) -> None:
    """One call on a small buffer; what a card refuses is found out again when times are taken."""
    with contextlib.suppress(Exception), set_to(setting) if setting is not None else contextlib.nullcontext():
        made = make().make(torch.device("cuda"))
        made.calls[0]()
        torch.cuda.synchronize()
        del made
    torch.cuda.empty_cache()


def _compile_share(share: int, shares: int, ahead: str, words: Sequence[str]) -> int:
    """In a process of its own: every shares-th of what is to be compiled, as far as `words` name it. Returns how many."""
    shapes = replace(Shapes(), calls=1, rotated_bytes=1)
    cases = all_cases(shapes)
    works: list[tuple[Callable[[], Case], Setting | None]]
    if ahead == "sweep":
        works = [(partial(trial.make, rows), None) for trial in named(trials(shapes), words) for rows in SWEPT_ROWS]
        works += [
            (partial(_same, case), one)
            for one in named_settings(words) for case in cases if any(part in case.name for part in one.cases)
        ]  # fmt: skip
    else:
        works = [(partial(_same, case), None) for case in cases]
    for make, setting in works[share::shares]:
        _run_once(make, setting)
    return len(works[share::shares])


def _same(case: Case) -> Case:
    return case


def named(tried: Sequence[Trial], words: Sequence[str]) -> list[Trial]:
    """Trials of the weights whose name holds one of `words`."""
    return [trial for trial in tried if any(word in trial.weight for word in words)]


def named_settings(words: Sequence[str]) -> list[Setting]:
    """Settings that are tried on cases whose name holds one of `words`."""
    return [one for one in SETTINGS if any(word in part for word in words for part in one.cases)]


def compile_ahead(processes: int, ahead: str, words: Sequence[str] = ("",)) -> int:
    """Fill Triton's cache on disk for the cases ("cases") or the trials that `words` name ("sweep"), in so many processes.

    Returns: the calls made.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(_compile_share, range(processes), [processes] * processes, [ahead] * processes, [words] * processes))


@dataclass(frozen=True, slots=True)
class Swept:
    """A trial's times by number of rows; none where it was wrong or would not run."""

    trial: Trial
    microseconds: tuple[float, ...]
    failure: str

    @property
    def total(self) -> float:
        return sum(self.microseconds) if self.microseconds else math.inf


def sweep(
    tried: Sequence[Trial], device: torch.device, timer: Timer, on_done: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Swept]:
    """Check and time every trial."""
    for number, trial in enumerate(tried):
        times: list[float] = []
        failure = ""
        for rows in SWEPT_ROWS:
            case = trial.make(rows)
            try:
                made = case.make(device)
                difference = made.difference()
                if math.isnan(difference) or difference > case.bound:
                    failure = f"differs by {difference:.2e}"
                    break
                times.append(timer.microseconds(made.calls))
            except RuntimeError as error:  # too much shared memory for this card, say: a fact about the tiling
                failure = str(error).splitlines()[0][:200]
                break
        yield Swept(trial, () if failure else tuple(times), failure)
        on_done(number + 1, len(tried))


def best(found: Sequence[Swept], count: int) -> dict[str, list[Swept]]:
    """The fastest `count` of each weight."""
    by_weight: dict[str, list[Swept]] = {}
    for one in found:
        by_weight.setdefault(one.trial.weight, []).append(one)
    return {weight: sorted(several, key=lambda one: one.total)[:count] for weight, several in by_weight.items()}


def table(found: Sequence[Swept], count: int = 4) -> Table:
    """For people: the fastest of each weight."""
    shown = Table(title="fastest tilings", title_justify="left")
    for name in ("weight", "outputs x width", "tiling", *(f"us, {rows} rows" for rows in SWEPT_ROWS)):
        shown.add_column(name)
    for weight, several in best(found, count).items():
        for one in several:
            tiling = one.trial.tiling
            said = ",".join(str(value) for value in asdict(tiling).values())
            times = [f"{time:.2f}" for time in one.microseconds] or [one.failure] * len(SWEPT_ROWS)
            shown.add_row(weight, f"{one.trial.outputs}x{one.trial.width}", said, *times)
    return shown


def constants(found: Sequence[Swept]) -> list[str]:
    """Lines for `tiling.py`: the fastest tiling of each weight that has one, and how much of the first tried one's time it takes."""
    lines = []
    for weight, (first, *_) in best(found, 1).items():
        if not first.microseconds:
            continue
        given = ", ".join(repr(value) for value in asdict(first.trial.tiling).values())
        more = f", {weight[3]}, {'routed' in weight}" if weight.startswith("int") else ""
        usual = next(one for one in found if one.trial.weight == weight).total
        key = f"{first.trial.outputs}, {first.trial.width}{more}"
        lines.append(f"({key}): Tiling({given}),  # {weight}: {first.total:.1f} us, the first tried {usual:.1f}")
    return lines


def as_json(found: Sequence[Swept]) -> list[dict[str, Any]]:
    """For programs: every trial."""
    return [
        {"weight": one.trial.weight, "outputs": one.trial.outputs, "width": one.trial.width, "tiling": asdict(one.trial.tiling),
         "rows": list(SWEPT_ROWS), "us": list(one.microseconds), "failure": one.failure}
        for one in found
    ]  # fmt: skip
