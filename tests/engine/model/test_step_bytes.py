"""Bytes that a step reads, against sums over the tensors of tiny models."""

import re
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

import engine.model.glm
from engine.model import Model, ModelConfig, load_model
from engine.model.bytes import draft_weights, held_bytes, step_weights
from engine.model.named import NAMED
from engine.model.source import ModelSource
from engine.model.stored import stored_shapes
from kernels.linear import BlockFp8
from tests.engine.model.model_weights import weights_of
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG, 3)
EXPERT = sum(TENSORS[f"model.layers.2.mlp.experts.0.{part}_proj.weight"].numel() for part in ("gate", "up", "down"))


def _values(*parts: str, layers: int = 4) -> int:
    """Values of the main layers' stored tensors whose names contain one of `parts`."""
    inside = [name for name in TENSORS if name.startswith("model.layers.") and int(name.split(".")[2]) < layers]
    return sum(TENSORS[name].numel() for name in inside if any(part in name for part in parts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_checkpoint(TENSORS, CONFIG, tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("rows", "touched"), [(1, 2), (2, 4), (3, 6), (4, 8), (5, 8), (64, 8)])
def test_a_step_reads_what_takes_part(model: Model, rows: int, touched: int) -> None:
    """Every part is the sum of its stored tensors; experts count as far as rows can choose distinct ones."""
    found = step_weights(model, rows)
    assert found.attention == 4 * _values("_a_proj", "_b_proj", "kv_a", "o_proj", "_layernorm")
    assert found.indexers == 4 * _values("indexer.")
    assert found.dense == 4 * _values("0.mlp.gate_proj", "0.mlp.up_proj", "0.mlp.down_proj", layers=1)
    assert found.shared == 4 * _values("shared_experts", "mlp.gate.")
    assert found.experts == 4 * 3 * touched * EXPERT
    assert found.outer == 4 * (48 + 96 * 48 + rows * 48)
    block = "model.layers.4."
    parts = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "input_layernorm.weight", "self_attn.kv_a_proj_with_mqa.weight",
             "self_attn.kv_a_layernorm.weight", "self_attn.indexer.wk.weight", "self_attn.indexer.k_norm.weight",
             "self_attn.indexer.k_norm.bias")  # fmt: skip
    assert found.mtp == 4 * sum(TENSORS[block + part].numel() for part in parts)
    assert found.total == sum((found.attention, found.indexers, found.dense, found.shared, found.experts, found.outer, found.mtp))


def test_a_step_that_uses_every_expert_reads_everything_but_the_block(model: Model) -> None:
    """With all experts chosen the parts come to all tensors but embedding rows nobody asks for and what the MTP block keeps for drafts."""
    found = step_weights(model, 1, experts=8)
    main = {name: tensor for name, tensor in weights_of(model).items() if not name.startswith((".mtp", ".embedding", ".frequencies"))}
    joined = {name for name in main if re.fullmatch(r"\.layers\.\d+\.down", name)}
    assert len(joined) == len(model.layers), "every layer's input products are views of one weight"
    main = {name: tensor for name, tensor in main.items() if name not in joined}
    assert found.total - found.mtp - 4 * 48 == sum(4 * tensor.numel() for tensor in main.values())
    assert step_weights(model, 1, experts=1).experts == 4 * 3 * EXPERT
    draft = draft_weights(model, 1, experts=8)
    block = sum(tensor.numel() for name, tensor in TENSORS.items() if name.startswith("model.layers.4."))
    assert draft.total == 4 * (block + 96 * 48 + 48)


def test_a_stage_counts_its_own_layers(model: Model, tmp_path: Path) -> None:
    """Two stages together read what the whole model reads; a middle one has no outer part."""
    directory = write_checkpoint(TENSORS, CONFIG, tmp_path)
    stages = [load_model(directory, layers=layers) for layers in (range(2), range(2, 4))]
    both = [step_weights(stage, 3) for stage in stages]
    whole = step_weights(model, 3)
    assert both[0].outer == 3 * 4 * 48
    # The last stage embeds tokens once more, for its MTP rows.
    assert both[0].total + both[1].total == whole.total + 3 * 4 * 48


def test_stored_sizes_count(tmp_path: Path) -> None:
    """bfloat16 weights are half the bytes, routers stay whole; a block-FP8 weight is its values and its scales."""
    config = tiny_config(num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=0)
    directory = write_checkpoint(random_tensors(config, 1), config, tmp_path)
    wide, narrow = (step_weights(load_model(directory, dtype=dtype), 2) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.attention * 2 == wide.attention
    assert wide.shared - narrow.shared == 2 * 3 * 24 * 48, "the router and its bias are float32 in both"
    assert held_bytes(BlockFp8(torch.zeros(3, 130, 256).to(torch.float8_e4m3fn), torch.ones(3, 2, 2))) == 3 * 130 * 256 + 4 * 3 * 2 * 2


class _Shapes:
    """A source of tensors without memory."""

    borrowed = False

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = stored_shapes(config, mtp=True)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=torch.float32 if name.endswith("bias") else torch.bfloat16, device="meta")

    def read_ahead(self, names: Collection[str]) -> None:
        """Nothing is read at all."""

    def close(self) -> None:
        """Nothing is open."""


def test_the_slice_reads_what_its_widths_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bf16 row of the slice: seven MoE layers of nine experts, three dense MLPs, ten attentions, four indexers, the head."""
    config = ModelConfig.read(NAMED["glm-5.3-slice"])
    source = ModelSource(config, _Shapes(config), torch.bfloat16)
    monkeypatch.setattr(engine.model.glm, "open_source", lambda *asked, **options: source)
    found = step_weights(load_model("glm-5.3-slice", device="meta"), 1)
    expert = 3 * 2048 * 6144
    attention = 2048 * 6144 + 16_384 * 2048 + 576 * 6144 + 28_672 * 512 + 6144 * 16_384 + 2 * 6144 + 2048 + 512
    assert found.experts == 2 * 7 * 8 * expert
    assert found.shared == 7 * (2 * expert + 4 * (64 * 6144 + 64))
    assert found.dense == 2 * 3 * 3 * 12_288 * 6144
    assert found.attention == 2 * 10 * attention
    assert found.indexers == 2 * 4 * (4096 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144)
    assert found.outer == 2 * (154_880 * 6144 + 2 * 6144)
    assert found.mtp == 2 * (12_288 * 6144 + 3 * 6144 + 576 * 6144 + 512 + 128 * 6144 + 2 * 128)
