"""Interpreted rounds: the reference's own tests, and plans, maps and counters bit for bit over random steps."""

import itertools
import time
from contextlib import nullcontext

import interpreted
import torch
from torch import Tensor

from kernels.round import RoundPlan, kernel, reference
from tests.kernels.round_world import LAYOUT, TABLE_LAYOUT, PlainSession, Step


def world(slots: list[int], logical: list[int], mirrored: list[int]) -> list[PlainSession | None]:
    """Sessions in any state, made alike each time."""
    sessions: list[PlainSession | None] = []
    for seed, (count, rows, safe) in enumerate(zip(slots, logical, mirrored, strict=True)):
        one = PlainSession(640, count, seed)
        one.grow(rows, safe)
        sessions.append(one)
    return [*sessions, None]


def everything(step: Step, sessions: list[PlainSession | None]) -> dict[str, Tensor]:
    """All that a plan writes: its fields, the sessions' maps and counters."""
    plan = step.plan
    found = {name: getattr(plan, name) for name in ("slot", "fill", "miss", "source", "misses", "miss_source")}
    for place, one in enumerate(sessions[:-1]):
        assert one is not None
        found[f"state of {place}"] = one.state
        for group, hot in enumerate(one.hot):
            found |= {f"{name} of {place}, {group}": getattr(hot, name) for name in ("slot_of", "position_of", "pin_round", "hand")}
    return found


def relative(found: dict[str, Tensor], sessions: list[PlainSession | None]) -> dict[str, Tensor]:
    """The same with addresses told as (whose memory, how far in), so that two worlds compare."""
    spans = [part for one in sessions[:-1] for part in (one.ring, *one.blocks)]  # type: ignore[union-attr]
    told = dict(found)
    for name in ("source", "miss_source"):
        addresses, place = found[name], torch.zeros_like(found[name])
        for number, memory in enumerate(spans):
            inside = (addresses >= memory.data_ptr()) & (addresses < memory.data_ptr() + memory.numel())
            place[inside] = (number + 1) * 2**32 + addresses[inside] - memory.data_ptr()
        assert bool(((place != 0) == (addresses != 0)).all()), f"{name} holds an address that is nobody's"
        told[name] = place
    return told


def selections(generator: torch.Generator, rows: int, picks: int, ends: Tensor, spread: int) -> Tensor:
    """Few distinct positions (duplicates within rows and between), -1 anywhere."""
    selection = (torch.rand(rows, picks, generator=generator) * ends[:, None]).int() // spread * spread
    selection[torch.rand(rows, picks, generator=generator) < 0.15] = -1
    return selection


def compare_random_steps(slots: list[int], picks: int, rows: int, steps: int, spread: int, seed: int) -> None:
    """Two equal worlds, one planned by the reference, one by the kernel, stay equal to the bit step after step."""
    generator = torch.Generator().manual_seed(seed)
    states = {"slots": slots, "logical": [300, 200, 70][: len(slots)], "mirrored": [256, 128, 64][: len(slots)]}
    worlds = [world(**states), world(**states)]
    plans = [RoundPlan.empty(rows, picks) for _ in worlds]  # as in a decode step: one plan for all rounds
    for index in range(steps):
        place_of = torch.randint(-1, len(slots) + 1, (rows,), generator=generator)
        ends = torch.tensor([states["logical"][place] if 0 <= place < len(slots) else 640 for place in place_of.tolist()])
        selection = selections(generator, rows, picks, ends, spread)
        told = []
        for form, sessions, plan in zip((reference, kernel), worlds, plans, strict=True):
            step = Step(sessions, place_of.tolist(), selection)
            for mine, poisoned in zip(plan.buffers, step.plan.buffers, strict=True):
                mine.copy_(poisoned)
            step.plan = plan
            form.begin_round(step.table.tensor)
            for group in (0, 1):
                form.plan_round(step.table.tensor, TABLE_LAYOUT, LAYOUT, group, step.place_of, step.mirrored, step.plan)
                told.append(relative({name: part.clone() for name, part in everything(step, sessions).items()}, sessions))
            if index % 4 == 3:
                form.clear_round(step.table.tensor, TABLE_LAYOUT, 1, step.place_of, step.plan)
                told.append(relative({name: part.clone() for name, part in everything(step, sessions).items()}, sessions))
            if index % 5 == 4:
                form.unmap_from(step.table.tensor, TABLE_LAYOUT, index % len(slots), 100)
        half = len(told) // 2
        for wanted, got in zip(told[:half], told[half:], strict=True):
            for name in wanted:
                interpreted.same(f"step {index}: {name}", got[name], wanted[name])
    for one in worlds[1][:-1]:
        assert one is not None
        one.check_maps()


def refused_picks_come_out_unused() -> None:
    """Positions past the session, or without a block, read nothing, map nothing and count as nothing; in a plan of one row and of two."""
    for rows in (1, 2):
        _one_refusal(rows)


def _one_refusal(rows: int) -> None:
    sessions = world([4], [300], [256])
    one = sessions[0]
    assert one is not None
    one.block_table[1] = 0
    step = Step(sessions, [0, -1][:rows], [[301, 70, 3, 2**31 - 1], [-1] * 4][:rows]).begin()
    plan = step.plan_group()
    assert (plan.source[0] != 0).tolist() == [False, False, True, False]
    assert plan.fill[0].tolist() == [-1, -1, 0, -1]
    assert plan.miss[0].tolist() == [-1, -1, 0, -1]
    assert one.counters() == (0, 1, 0)
    assert int((one.hot[0].slot_of != -1).sum()) == 1


def long_circles_close() -> None:
    """With windows shorter than the circle, the hand passes pinned stretches, wraps, and stops when nothing is free."""
    slots = 300
    for hand, start in itertools.product((0, 150, 299), (0, 100)):
        told = []
        for form in (reference, kernel):
            sessions = world([slots], [600], [576])
            one = sessions[0]
            assert one is not None
            for first in range(0, 300, 100):
                step = Step(sessions, [0], [list(range(first, first + 100))])
                form.begin_round(step.table.tensor)
                form.plan_round(step.table.tensor, TABLE_LAYOUT, LAYOUT, 0, step.place_of, step.mirrored, step.plan)
            one.hot[0].hand.fill_(hand)
            hits = [list(range(start, start + 100)), list(range(start + 50, start + 150))]
            rows = [*hits, list(range(400, 500)), [*range(500, 576)] + [-1] * 24]
            step = Step(sessions, [0] * 4, rows)
            form.begin_round(step.table.tensor)
            form.plan_round(step.table.tensor, TABLE_LAYOUT, LAYOUT, 0, step.place_of, step.mirrored, step.plan)
            told.append(relative(everything(step, sessions), sessions))
        for name in told[0]:
            interpreted.same(f"hand {hand}, hits from {start}: {name}", told[1][name], told[0][name])
        assert int(told[0]["fill"].max()) > 128, "no window but the first was needed"


def main() -> None:
    begun = time.monotonic()
    shapes = (([40, 9], 33, 4, 3), ([5], 1, 1, 16), ([8], 65, 3, 2), ([64, 64, 64], 64, 5, 1))
    alone = (([40, 9], 33, 3), ([20], 64, 2), ([7], 100, 1), ([300, 64], 128, 1))  # one row
    for slots, picks, rows, spread in interpreted.some(shapes, 2):
        compare_random_steps(slots, picks, rows, 4, spread, seed=picks)
    for slots, picks, spread in interpreted.some(alone, 2):
        compare_random_steps(slots, picks, 1, 8, spread, seed=picks)
    kernel.PICKS_TILE, kernel.SETTLE_TILE_MAX, tiles = 8, 4, (kernel.PICKS_TILE, kernel.SETTLE_TILE_MAX)
    for programs in (nullcontext, interpreted.programs_backwards):
        with programs():
            compare_random_steps([2, 12, 3], 11, 6, 4, 16, seed=1)
    kernel.PICKS_TILE, kernel.SETTLE_TILE_MAX = tiles
    long_circles_close()
    refused_picks_come_out_unused()
    interpreted.run_reference_tests("test_round.py", without=("refused", "pick_by_pick", "depend_on_its_company", "divides_ring"))
    print(f"rounds: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
