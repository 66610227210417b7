"""What the engine drafts against drafting in plain torch, in both regimes of the selection."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.draft
from kernels.address import tensor_at
from kernels.layout import STATE_FIELDS, StateField, TableField
from kernels.sample import sample
from tests.engine.draft_reference import DraftReference
from tests.engine.guesses import guess_right
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint
from tests.engine.runs import Run, greedy, run, small
from tests.engine.test_drafts import sampled

DEPTH, NEW = 4, 12
GAP = 1e-3  # choices closer than this are a coin toss between two orders of summation
SHAPES: dict[str, dict[str, Any]] = {
    "shared selection": {"index_share_for_mtp_iteration": True},
    "each selects": {"index_share_for_mtp_iteration": False},
    "grouped, shared selection": {
        "n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "index_share_for_mtp_iteration": True,
    },
    "grouped, each selects": {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
}  # fmt: skip


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """A list that grows by (position of the last committed token, what was drafted behind it), before anybody replaces the drafts."""
    real, found = engine.draft.keep_drafts, []

    def keep(table: Tensor, drafts: Tensor, ends: Tensor) -> None:
        state = tensor_at(int(table[0, TableField.STATE]), (STATE_FIELDS,), torch.int64)
        found.append((int(state[StateField.LOGICAL]), drafts[0].tolist()))
        real(table, drafts, ends)

    monkeypatch.setattr(engine.draft, "keep_drafts", keep)
    return found


class Picker:
    """Chooses as a request's sampling does, and knows how many of its choices were clear, up to the first that was not."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._row = torch.tensor([[temperature, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
        self._seed = torch.tensor([seed])
        self.clear, self._doubt = 0, False

    def __call__(self, logits: Tensor, position: int) -> int:
        zero = torch.zeros(1, dtype=torch.int64)
        found = {self._token(logits + noise, torch.tensor([position]), zero) for noise in self._shaken(logits)}
        self._doubt |= len(found) > 1
        self.clear += not self._doubt
        return self._token(logits, torch.tensor([position]), zero)

    def _token(self, logits: Tensor, position: Tensor, zero: Tensor) -> int:
        return int(sample(logits[None], self._row, self._seed, position, zero, zero))

    @staticmethod
    def _shaken(logits: Tensor) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [GAP * torch.randn(logits.shape, generator=generator) for _ in range(8)]


async def _drafted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: dict[str, Any], temperature: float
) -> tuple[DraftReference, Run, list[tuple[int, list[int]]]]:  # fmt: skip
    config = tiny_config(**shape)
    tensors = random_tensors(config, 3)
    model = write_checkpoint(tensors, config, tmp_path / "model")
    prompt = torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(8)).tolist()
    sampling = sampled(NEW, temperature, 11) if temperature else greedy(NEW)
    plain = await run(model, small(), [(prompt, NEW)], sampling)
    guess_right(monkeypatch, [plain.context], lambda position, drafts: position % (drafts + 1), 96)
    found = recorded(monkeypatch)
    assert (await run(model, small(draft_depth=DEPTH, hot_rows=8), [(prompt, NEW)], sampling)).same_bits(plain)
    return DraftReference(tensors, config), plain, found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
async def test_drafts_are_the_references(shape: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind any number of accepted drafts, every draft of a chain is the one that plain torch makes of the same tokens."""
    reference, text, found = await _drafted(monkeypatch, tmp_path, SHAPES[shape], temperature)
    states = reference.states(text.context)
    compared = 0
    for position, drafts in found:
        if position >= len(text.context):
            continue  # of a step that was rolled back
        picker = Picker(temperature, 11)
        wanted = reference.drafts(text.context[: position + 1], states, DEPTH, picker)
        assert drafts[: picker.clear] == wanted[: picker.clear], f"behind position {position}"
        compared += picker.clear
    assert len(found) >= 4
    assert compared >= 3 * len(found), f"only {compared} clear choices in {len(found)} rounds"


@pytest.mark.parametrize("mistake", ["wrong regime", "position late", "row of the last draft lost"])
async def test_mistakes_of_a_chain_show(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails for the other regime, for a chain at the wrong positions, and for drafts that do not see one another."""
    shares = mistake == "position late"
    if mistake == "position late":
        real = engine.draft.Drafter._ask

        def ask(self: Any, depth: int, *rest: Any) -> None:
            self._position -= depth
            try:
                real(self, depth, *rest)
            finally:
                self._position += depth

        monkeypatch.setattr(engine.draft.Drafter, "_ask", ask)
    if mistake == "row of the last draft lost":
        store = engine.draft.Drafter._store
        monkeypatch.setattr(
            engine.draft.Drafter, "_store", lambda self, table, x, place_of, slots: store(self, table, x, place_of, slots)
            if place_of.shape == self._judged.next_of.shape else None,
        )  # fmt: skip
    reference, text, found = await _drafted(monkeypatch, tmp_path, {"index_share_for_mtp_iteration": shares}, 0.0)
    if mistake == "wrong regime":
        object.__setattr__(reference.config, "share_mtp_selection", True)
    states = reference.states(text.context)
    known = [(position, drafts) for position, drafts in found if position < len(text.context)]
    wrong = [position for position, drafts in known if reference.drafts(text.context[: position + 1], states, DEPTH, _first) != drafts]
    assert wrong, "nothing differs"


def _first(logits: Tensor, position: int) -> int:
    return int(logits.argmax())
