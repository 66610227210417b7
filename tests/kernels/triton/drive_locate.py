"""Interpreted locating: the reference's own tests, and addresses of many rows, picks and places at once."""

import time

import interpreted
import torch

from kernels.layout import RING_BLOCKS, WHOLE, PageShare
from kernels.locate import kernel, reference
from tests.kernels.round_world import LAYOUT, PAGES_MAX, PlainSession, Step


def worlds() -> tuple[list[PlainSession | None], Step]:
    """An offloaded session, a resident one and a free place, 9 rows in any order over them."""
    sessions: list[PlainSession | None] = [PlainSession(2112, 4, 1), PlainSession(2112, 4, 2), None]
    for one in sessions[:2]:
        assert one is not None
        one.grow(2112, 2112)
        one.pages.copy_(torch.arange(1, LAYOUT.key_layers * PAGES_MAX + 1).view(LAYOUT.key_layers, PAGES_MAX) << 20)
    generator = torch.Generator().manual_seed(3)
    selection = torch.randint(-1, 2112, (9, 40), generator=generator).int()
    step = Step(sessions, [0, 1, -1, 2, 1, 0, 0, 1, 1], selection)
    assert sessions[0] is not None
    assert sessions[1] is not None
    step.table.rewrite([sessions[0].table_row(3), sessions[1].table_row(4, resident=True)])()
    return sessions, step


def addresses_are_the_references(step: Step) -> None:
    """Every address of new rows, keys and pages, and every field of a resident plan, is the reference's."""
    positions = torch.randint(0, 2112, (9,), generator=torch.Generator().manual_seed(4))
    positions[2] = 2**62
    for share in (WHOLE, PageShare(2, 0), PageShare(2, 1)):
        wanted = reference.locate_new(step.table.tensor, LAYOUT, step.place_of, positions, share)
        got = kernel.locate_new(step.table.tensor, LAYOUT, step.place_of, positions, share)
        for name, mine, its in zip(("rows", "keys", "pages"), got, wanted, strict=True):
            interpreted.same(f"{name} of {share}", mine, its)
    plans = []
    for form in (reference, kernel):
        for buffer in step.plan.buffers:
            buffer.fill_(77)
        form.locate_resident(step.table.tensor, LAYOUT, step.place_of, step.selection, step.plan)
        plans.append([buffer.clone() for buffer in step.plan.buffers])
    for name, its, mine in zip(("selection", "slot", "fill", "miss", "source", "misses", "miss_source"), *plans, strict=True):
        interpreted.same(name, mine, its)


def what_is_absent_has_no_address(sessions: list[PlainSession | None], step: Step) -> None:
    """A block or page of address 0 gives 0, never an address near it; a session with a ring needs no block."""
    for one in sessions[:2]:
        assert one is not None
        one.block_table.zero_()
        one.pages.zero_()
    rows, keys, pages = kernel.locate_new(step.table.tensor, LAYOUT, step.place_of, torch.full((9,), 1000))
    ringed = step.place_of == 0
    assert sessions[0] is not None
    assert bool((rows[ringed] >= sessions[0].ring.data_ptr()).all())
    assert bool((rows[ringed] < sessions[0].ring.data_ptr() + RING_BLOCKS * LAYOUT.block_bytes).all())
    assert not bool(torch.stack([rows, keys])[:, ~ringed].any())
    assert not bool(pages.any())
    kernel.locate_resident(step.table.tensor, LAYOUT, step.place_of, step.selection, step.plan)
    assert not bool(step.plan.source.any())


def main() -> None:
    begun = time.monotonic()
    sessions, step = worlds()
    addresses_are_the_references(step)
    kernel.NEW_TILE, kernel.PICKS_TILE = 4, 32
    with interpreted.programs_backwards():
        addresses_are_the_references(step)
    what_is_absent_has_no_address(sessions, step)
    interpreted.run_reference_tests("test_locate.py", without=("refused",))
    print(f"locating: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
