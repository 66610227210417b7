"""Interpreted drafted rows against the reference: every mix of rows, drafts and free places, over several steps, programs backwards too."""

import interpreted
import torch
from torch import Tensor

from kernels.layout import DRAFTS_MAX, STATE_FIELDS, StateField
from kernels.verify import kernel, reference
from tests.kernels.verify_world import VerifyWorld


def step(form: object, world: VerifyWorld, each: int, guesses: Tensor, lucky: Tensor, ends: Tensor) -> dict[str, Tensor]:
    """One step through `form` (reference or kernel), and all it wrote."""
    places = world.table.shape[0]
    place_of = torch.full((places * each,), 99, dtype=torch.int32)
    positions, tokens = torch.full((places * each,), -9), torch.full((places * each,), -9)
    mirrored, judged, unbroken = torch.full((places,), -9), torch.full((places,), -9), torch.full((places * each,), -9)
    form.spread_rows(world.table, place_of, positions, tokens, mirrored, judged, unbroken)  # type: ignore[attr-defined]
    samples = torch.where(lucky[: places * each], tokens.roll(-1), 3)  # where lucky: the draft of the row behind
    bad = torch.where(lucky[: places * each], -1, torch.arange(places * each))
    accepted, next_of = torch.full((places,), -9), torch.full_like(place_of, 99)
    form.accept_rows(world.table, place_of, tokens, samples, bad, world.addresses(), accepted, next_of)  # type: ignore[attr-defined]
    form.keep_drafts(world.table, guesses[:places], ends)  # type: ignore[attr-defined]
    return {
        "place_of": place_of, "positions": positions, "tokens": tokens, "accepted": accepted, "next_of": next_of,
        "states": world.states, "counts": world.counts, "mirrored": mirrored, "judged": judged, "unbroken": unbroken,
    }  # fmt: skip


def compare(rows_of: list[int], drafts_of: list[int], each: int) -> int:
    """Equal bytes after each of four steps. Returns the drafts accepted on the way."""
    worlds = VerifyWorld(rows_of, drafts_of, seed=each), VerifyWorld(rows_of, drafts_of, seed=each)
    generator = torch.Generator().manual_seed(7 * each + len(rows_of))
    found = 0
    for index in range(4):
        guesses = torch.randint(0, 50, (8, min(max(1, each - 1 + index % 2), DRAFTS_MAX)), generator=generator)
        lucky = torch.rand(8 * 8, generator=generator) < 0.8
        ends = torch.randint(0, 50, (index,), generator=generator)
        wanted = step(reference, worlds[0], each, guesses, lucky, ends)
        got = step(kernel, worlds[1], each, guesses, lucky, ends)
        for name, value in wanted.items():
            interpreted.same(f"rows {rows_of}, {each} each, step {index}: {name}", got[name], value)
        found += int(wanted["accepted"].sum()) - len([rows for rows in rows_of if rows])
    assert int(worlds[1].states[:, StateField.LOGICAL].max()) > 2**32, "positions past 32 bits are among them"
    return found


def standings_move(rows_of: list[int]) -> None:
    """What one stage's sessions stand at reaches another's, in both forms alike."""
    sources = VerifyWorld(rows_of, [0] * len(rows_of), seed=1), VerifyWorld(rows_of, [0] * len(rows_of), seed=1)
    targets = VerifyWorld(rows_of, [1] * len(rows_of), seed=2), VerifyWorld(rows_of, [1] * len(rows_of), seed=2)
    standing = [torch.full((len(rows_of), STATE_FIELDS), -9) for _ in range(2)]
    for form, source, target, values in zip((reference, kernel), sources, targets, standing, strict=True):
        form.read_standing(source.table, values)
        form.write_standing(target.table, values)
    interpreted.same("standing", standing[1], standing[0])
    interpreted.same("states behind it", targets[1].states, targets[0].states)


def main() -> None:
    standings_move([2, 0, 1])
    found = compare([1, 1, 0], [0, 3, 2], 1)
    assert found == 0
    found += compare([2, 1, 0, 2, 2], [1, 1, 1, 0, 7], 2)
    found += compare([4, 4, 0, 3, 1, 2], [3, 0, 3, 3, 3, 3], 4)
    with interpreted.programs_backwards():
        found += compare([8, 0, 8], [7, 7, 5], 8)
        found += compare([3], [2], 3)
    assert found > 20, f"only {found} drafts were accepted"


if __name__ == "__main__":
    main()
