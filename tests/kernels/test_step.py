"""What a step keeps of its last rows: logits in float32 and flags of broken ones, hidden states of either dtype."""

import math

import pytest
import torch

from kernels.layout import HIDDEN_ROWS, STATE_FIELDS, StateField, TableField, TableLayout
from kernels.step import follow_rows, keep_logits, load_hidden, store_hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_logits_are_flagged_once(dtype: torch.dtype, value: float) -> None:
    """Logits are kept as they are; a row with a value that is not finite is flagged unless a layer was before it."""
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, 32], logits[2, 0] = value, value
    kept, bad_layer = torch.full((4, 33), 9.0), torch.tensor([-1, -1, 2, -1])
    keep_logits(logits, kept, bad_layer, 7)
    assert torch.equal(kept.nan_to_num(1.5), logits.float().nan_to_num(1.5))
    assert bad_layer.tolist() == [-1, 7, 2, -1]


def test_a_peer_follows_what_the_owner_laid_out() -> None:
    """LOGICAL becomes the place's first position, MIRRORED is read down to whole blocks, a free place is left alone and reads 0."""
    states = torch.arange(3 * STATE_FIELDS).view(3, STATE_FIELDS).clone()
    states[:, StateField.MIRRORED] = torch.tensor([127, 64, 500])
    before = states.clone()
    table = torch.zeros((3, TableLayout(1).fields), dtype=torch.int64)
    table[:, TableField.STATE] = torch.tensor([state.data_ptr() for state in states])
    table[:, TableField.ROWS] = torch.tensor([2, 0, 1])
    mirrored = torch.full((3,), 9)
    follow_rows(table, torch.tensor([130, 131, 7, 8, 70, 0]), mirrored)
    assert mirrored.tolist() == [64, 0, 448]
    before[0, StateField.LOGICAL], before[2, StateField.LOGICAL] = 130, 70
    assert torch.equal(states, before)


def test_states_are_found_again() -> None:
    """A state is kept in float32 and found by the row behind it, in the dtype asked for; position 0, padding and free places find zeros."""
    hidden = torch.zeros(2, HIDDEN_ROWS, 5)
    table = torch.zeros((3, TableLayout(1).fields), dtype=torch.int64)
    table[:2, TableField.ROWS] = 1
    table[:2, TableField.HIDDEN] = torch.tensor([part.data_ptr() for part in hidden])
    place_of = torch.tensor([1, 0, 2, -1], dtype=torch.int32)
    states = torch.randn(4, 5, generator=torch.Generator().manual_seed(2)).bfloat16()
    store_hidden(table, place_of, torch.tensor([31, 16, 3, 4]), states)
    assert torch.equal(hidden[1, 15], states[0].float())
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.full((4, 5), 9.0).to(dtype)
        load_hidden(table, place_of, torch.tensor([32, 17, 4, 5]), found)
        assert torch.equal(found[:2], states[:2].to(dtype))
        assert not bool(found[2:].any())
        apart = torch.full((2, 5), 9.0).to(dtype)
        load_hidden(table, place_of[::2], torch.tensor([32, 17, 4])[::2], apart)
        assert torch.equal(apart, found[::2])
        load_hidden(table, place_of, torch.zeros(4, dtype=torch.int64), found)
        assert not bool(found.any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [154_880, 96, 2_049])
def test_a_card_keeps_and_flags_the_same(dtype: torch.dtype, width: int) -> None:
    """Copies to the bit, and the CPU's flags, also of the last value and of several in one row; replays of the launch find new rows."""
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, -1], logits[2, ::7], logits[3, 0], logits[4, 5] = math.inf, math.nan, -math.inf, math.nan
    told = [(torch.full((6, width), 9.0, device=device), torch.tensor([-1, -1, -1, 2, -1, 3], device=device)) for device in ("cpu", "cuda")]
    for kept, bad_layer in told:
        keep_logits(logits.to(kept.device), kept, bad_layer, 78)
    assert torch.equal(told[1][0].cpu().view(torch.int32), told[0][0].view(torch.int32))
    assert told[1][1].tolist() == told[0][1].tolist() == [-1, 78, 78, 2, 78, 3]
