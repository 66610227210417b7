"""Drafts of a chosen quality: what the MTP block guessed is replaced by the coming text, right for a scripted number of tokens.

Tiny random models guess almost nothing right; this makes every count of accepted drafts happen.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import engine.draft
from kernels.address import tensor_at
from kernels.layout import STATE_FIELDS, StateField, TableField

__all__ = ["guess_right"]


def guess_right(
    monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]], right: Callable[[int, int], int], vocabulary: int
) -> list[int]:
    """Let every draft of sessions that write one of `texts` (prompt included) be right for `right(position, drafts)` tokens, then wrong.

    Returns: a list that grows by how many were made right, one a place and round.
    """
    real, made = engine.draft.keep_drafts, []

    def keep(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
        guessed = drafts.clone()
        for place, (rows, address) in enumerate(table[:, [TableField.ROWS, TableField.STATE]].tolist()):
            if rows < 2:
                continue
            state = tensor_at(address, (STATE_FIELDS,), torch.int64)
            position, token = int(state[StateField.LOGICAL]), int(state[StateField.TOKEN])
            text = next((one for one in texts if position < len(one) and one[position] == token), None)
            if text is None:
                continue
            coming = text[position + 1 : position + 1 + drafts.shape[1]]
            count = min(right(position, drafts.shape[1]), len(coming))
            guessed[place, :count] = torch.tensor(coming[:count], dtype=torch.int64)
            if count < drafts.shape[1]:
                guessed[place, count] = (coming[count] + 1) % vocabulary if count < len(coming) else 0
            made.append(count)
        real(table, guessed, ends)

    monkeypatch.setattr(engine.draft, "keep_drafts", keep)
    return made
