"""Selections over keys on two devices: the one that a single device makes, whatever ties, NaN and lengths."""

import math
import random

import pytest
import torch
from torch import Tensor

from kernels.candidates import Candidates, local_positions, merge_candidates, own_candidates, share_first
from kernels.candidates.reference import to_positions
from kernels.layout import PAGE_KEYS, WHOLE, KeyLayout, PageShare, TableField, TableLayout
from kernels.select import select
from kernels.selection import select_places

SHARES = (PageShare(2, 0), PageShare(2, 1))
LAYOUT = KeyLayout("bf16", 16)


@pytest.mark.parametrize("share", [*SHARES, WHOLE, PageShare(3, 2)])
def test_local_positions_count_a_devices_own_keys(share: PageShare) -> None:
    """The local position of p is the number of keys at or below p that the device has, less one, and leads back to the last of them."""
    asked = [-1, 0, 1, 1023, 1024, 1025, 2047, 2048, 3071, 3072, 4095, 4096, 5000]
    own = [p for p in range(5001) if p // PAGE_KEYS % share.devices == share.device]
    found = local_positions(torch.tensor(asked), share)
    assert found.tolist() == [sum(p <= most for p in own) - 1 for most in asked]
    back = found.int()
    to_positions(back, share)
    assert back.tolist() == [max((p for p in own if p <= most), default=-1) for most in asked]


def test_a_share_counts_its_pages() -> None:
    """Pages of a share, where each stands, and which it is, agree."""
    for share in (*SHARES, WHOLE, PageShare(3, 1)):
        own = [page for page in range(30) if share.has(page)]
        for pages in range(30):
            assert share.pages(pages) == sum(page < pages for page in own)
        for place, page in enumerate(own):
            assert share.page(place) == page
            assert share.pages(page) == place


def chosen(scores: Tensor, lengths: list[int], k: int, first: int) -> list[Candidates]:
    """What each device chooses of scores by position."""
    out = []
    for share in SHARES:
        own = torch.tensor([p for p in range(scores.shape[1]) if share.has(p // PAGE_KEYS)], dtype=torch.int64)
        last = local_positions(torch.tensor(lengths) - 1, share) + 1
        found = Candidates.empty(scores.shape[0], k, torch.device("cpu"))
        select(scores[:, own].contiguous(), torch.full_like(last, share_first(first, share)), last, k, found.positions)
        found.scores.copy_(scores[:, own].gather(1, found.positions.clamp_min(0).long()))
        to_positions(found.positions, share)
        out.append(found)
    return out


def merged(scores: Tensor, lengths: list[int], k: int, first: int = 0) -> Tensor:
    out = torch.full((scores.shape[0], k), 77, dtype=torch.int32)
    merge_candidates(*chosen(scores, lengths, k, first), out)
    return out


def whole(scores: Tensor, lengths: list[int], k: int, first: int = 0) -> Tensor:
    out = torch.full((scores.shape[0], k), 78, dtype=torch.int32)
    select(scores, torch.full((len(lengths),), first, dtype=torch.int64), torch.tensor(lengths), k, out)
    return out


LENGTHS = [0, 1, 7, 8, 9, 1023, 1024, 1025, 2047, 2049, 3073, 4096]


@pytest.mark.parametrize("k", [1, 8, 700])
@pytest.mark.parametrize("values", [1, 3, 1000])
def test_the_best_of_both_are_the_best_of_all(k: int, values: int) -> None:
    """Scores of so few values that most tie, over every page boundary: the unsplit selection, ties to the lower position included."""
    scores = torch.randint(0, values, (len(LENGTHS), 4096), generator=torch.Generator().manual_seed(values)).float() - values // 2
    for first in (0, 1):
        assert torch.equal(merged(scores, LENGTHS, k, first), whole(scores, LENGTHS, k, first))


def test_ties_across_the_pages_go_to_the_lower_position() -> None:
    """Equal scores on both sides of every page boundary: the lowest positions are chosen, the other device's among them."""
    scores = torch.zeros((1, 4096))
    scores[0, [1022, 1023, 1024, 1025, 2047, 2048, 3071, 3072]] = 5.0
    assert merged(scores, [4096], 6).tolist() == [[1022, 1023, 1024, 1025, 2047, 2048]]
    assert merged(scores, [4096], 10).tolist() == [[0, 1, 1022, 1023, 1024, 1025, 2047, 2048, 3071, 3072]]


def test_values_that_are_no_numbers_rank_as_unsplit() -> None:
    """NaN below -inf below all else, zeros of both signs equal, in any mixture and on either device."""
    draw = random.Random(5)
    strange = [math.nan, -math.inf, math.inf, 0.0, -0.0, 1.0, -1.0]
    scores = torch.tensor([[draw.choice(strange) for _ in range(4096)] for _ in LENGTHS])
    scores[3], scores[-1] = math.nan, -math.inf
    for k in (1, 9, 2048):
        assert torch.equal(merged(scores, LENGTHS, k), whole(scores, LENGTHS, k))


class World:
    """Sessions whose keys lie whole and split; memory without a key is NaN."""

    def __init__(self, lengths: list[int], layout: KeyLayout = LAYOUT) -> None:
        generator = torch.Generator().manual_seed(3)
        fields = TableLayout(1).fields
        self.tables = {share: torch.zeros((len(lengths), fields), dtype=torch.int64) for share in (WHOLE, *SHARES)}
        self.held: list[Tensor] = []
        for place, length in enumerate(lengths):
            keys = torch.full((4, PAGE_KEYS, 16), float("nan"), dtype=torch.bfloat16)
            keys.view(-1, 16)[:length] = torch.randint(-2, 3, (length, 16), generator=generator).bfloat16()
            for share, table in self.tables.items():
                own = [keys[page].clone() for page in range(-(-length // PAGE_KEYS)) if share.has(page)]
                pages = torch.tensor([[page.data_ptr() for page in own] + [0] * (4 - len(own))])
                self.held += [*own, pages]
                table[place, TableField.ROWS] = 4
                table[place, TableField.PAGES], table[place, TableField.PAGES_MAX] = pages.data_ptr(), 4


def test_scores_through_split_page_tables_choose_the_same() -> None:
    """Rows of several sessions, padding among them: candidates by each device's own table merge to the selection by the whole one."""
    lengths = [1, 1024, 1025, 2500, 4096]
    world = World(lengths)
    place_of = torch.tensor([4, 0, 3, -1, 2, 1, 3, 4], dtype=torch.int32)
    positions = torch.tensor([4095, 0, 2499, 2**40, 1024, 1023, 1500, 3000])
    generator = torch.Generator().manual_seed(8)
    query = torch.randint(-2, 3, (8, 4, 16), generator=generator).float()
    weights = torch.randint(-2, 3, (8, 4), generator=generator).float()
    for first, k in ((0, 8), (1, 300)):
        wanted = torch.full((8, k), 5, dtype=torch.int32)
        select_places(world.tables[WHOLE], 0, place_of, positions, query, weights, LAYOUT, first, wanted)
        found = []
        for share in SHARES:
            found.append(Candidates.empty(8, k, torch.device("cpu")))
            own_candidates(world.tables[share], 0, place_of, positions, query, weights, LAYOUT, first, share, found[-1])
        out = torch.full((8, k), 6, dtype=torch.int32)
        merge_candidates(found[0], found[1], out)
        assert torch.equal(out, wanted)
        assert bool((found[1].positions[1] == -1).all()), "a session of one page has keys on one device"
