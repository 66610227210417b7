"""Interpreted attention by a plan: the bits of gathering first, the same slots filled, for offloaded places in any company."""

import interpreted
import torch
from torch import Tensor

from kernels.sparse_mla import kernel, planned
from tests.kernels.round_world import LAYOUT, ROW_BYTES, TABLE_LAYOUT, PlainSession, Step

SCALE = 0.3


def world() -> list[PlainSession | None]:
    """Two sessions with hot caches too small for what is asked, in states with ring rows; a free place after them."""
    sessions: list[PlainSession | None] = []
    for seed, (slots, logical, mirrored) in enumerate([(40, 300, 256), (9, 200, 128)]):
        one = PlainSession(640, slots, seed)
        one.grow(logical, mirrored)
        one.truth.clamp_(max=120)  # finite in bfloat16
        for memory in (one.ring, *one.blocks):
            memory.clamp_(max=120)
        sessions.append(one)
    return [*sessions, None]


def slots_of(sessions: list[PlainSession | None]) -> list[Tensor]:
    return [hot.slots for one in sessions if one is not None for hot in one.hot]


def by_plan_and_gathered(step: Step, sessions: list[PlainSession | None], picks: int, scratch_rows: int | None) -> None:
    """Every layer of both groups of one planned step, each way from the same slots."""
    live = torch.tensor([0 <= place < 2 for place in step.place_of.tolist()])
    selection = torch.where(live[:, None], step.selection, -1)
    query, turned = torch.randn(len(live), 5, 4).bfloat16(), torch.randn(len(live), 5, 4).bfloat16()
    for group, layers in enumerate(LAYOUT.groups):
        step.plan_group(group)
        for layer_in_group, layer in enumerate(layers):
            scratch = None if scratch_rows is None else step.fetch(layer, scratch_rows)
            before = [slots.clone() for slots in slots_of(sessions)]
            rows = step.gather(group, layer_in_group, scratch)
            wanted = kernel.sparse_mla_packed(query, turned, rows, selection, LAYOUT.row, SCALE)
            filled = [slots.clone() for slots in slots_of(sessions)]
            for slots, held in zip(slots_of(sessions), before, strict=True):
                slots.copy_(held)
            got = planned.sparse_mla_round(
                query, turned, step.plan, step.table.tensor, TABLE_LAYOUT, step.place_of, group, layer_in_group,
                LAYOUT.row_offset(layer), LAYOUT.row, SCALE, scratch,
            )  # fmt: skip
            assert not bool(got.isnan().any())
            interpreted.same(f"layer {layer} of {picks} picks", got.view(torch.int16), wanted.view(torch.int16))
            for slots, held in zip(slots_of(sessions), filled, strict=True):
                interpreted.same(f"slots of layer {layer}", slots, held)
            assert any(not torch.equal(held, was) for held, was in zip(filled, before, strict=True)) or layer_in_group > 0


def main() -> None:
    assert LAYOUT.row.row_bytes == ROW_BYTES
    kernel.SPLIT_PICKS = 32
    sessions = world()
    generator = torch.Generator().manual_seed(3)
    ends = torch.tensor([300, 200, 640])
    for picks, scratch_rows in interpreted.some(((64, 3), (33, None), (40, 500)), 3):
        torch.manual_seed(picks)
        place_of = [0, 1, -1, 0, 2]
        selection = (torch.rand(5, picks, generator=generator) * ends[torch.tensor(place_of)][:, None]).int()
        selection[torch.rand(5, picks, generator=generator) < 0.15] = -1
        with interpreted.programs_backwards():
            by_plan_and_gathered(Step(sessions, place_of, selection).begin(), sessions, picks, scratch_rows)
    for one in sessions[:2]:
        assert one is not None
        one.check_maps()


if __name__ == "__main__":
    main()
