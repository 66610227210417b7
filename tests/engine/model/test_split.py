"""Weights on two devices: views where there is one memory, and parts whose outputs add up to the whole layer's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import BadSetting
from engine.model.glm import Model, load_model
from engine.model.moe import DenseWeights, MoeWeights
from engine.model.split import PeerExperts, PeerModel, Splitter, _columns, _middle, _moved, _rows, split_model
from kernels.linear.block_fp8 import BlockFp8
from kernels.linear.group_int import GroupInt
from tests.engine.model.parity import named
from tests.engine.model.tiny_models import random_tensors, tiny_config, write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[{}, {"num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 5}])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model, PeerModel]:
    config = tiny_config(**request.param)
    directory = write_checkpoint(random_tensors(config, named("shared").seed), config, tmp_path_factory.mktemp("split") / "model")
    whole = load_model(directory)
    return whole, *split_model(whole, CPU)


def states(model: Model, rows: int) -> Tensor:
    return torch.randn((rows, model.config.hidden), generator=torch.Generator().manual_seed(rows))


def test_both_parts_of_attention_are_the_whole(models: tuple[Model, Model, PeerModel]) -> None:
    """Queries side by side are the whole layer's, and outputs added in float32 its output to rounding, for every number of heads."""
    whole, owner, peer = models
    cos, sin = whole.rope(torch.arange(5))
    for layer, own, its in zip(whole.layers, owner.layers, peer.layers, strict=True):
        qr = layer.mla.project_latent(states(whole, 5))
        queries = layer.mla.project_query(qr, cos, sin)
        parts = [heads.project_query(qr, cos, sin) for heads in (own.mla.heads, its.heads)]
        for wanted, *got in zip(queries, *parts, strict=True):
            assert torch.allclose(torch.cat(got, 1), wanted, atol=1e-6)
        attended = torch.randn_like(queries[0])
        middle = own.mla.heads.key_up.shape[0]
        assert 0 < middle < whole.config.heads
        added = own.mla.project_output(attended[:, :middle].contiguous()) + its.heads.project_output(attended[:, middle:].contiguous())
        assert torch.allclose(added, layer.mla.project_output(attended), atol=1e-5)


def test_both_parts_of_an_mlp_are_the_whole(models: tuple[Model, Model, PeerModel]) -> None:
    """Dense and routed layers: what the owner's part and the peer's add is what the layer adds, and both chose some expert of their own."""
    whole, owner, peer = models
    kinds = set()
    for layer, own, its in zip(whole.layers, owner.layers, peer.layers, strict=True):
        y = states(whole, 40)
        kinds.add(type(layer.mlp))
        chosen = None
        if isinstance(own.mlp, MoeWeights):
            chosen = own.mlp.route(y)
            assert torch.equal(chosen[0], layer.mlp.route(y)[0])  # type: ignore[union-attr]  # of the same kind
            assert bool((chosen[0] < own.mlp.gate_up.shape[0]).any())
            assert bool((chosen[0] >= own.mlp.gate_up.shape[0]).any())
        added = own.feed_forward(y) + its.feed(y, chosen)
        assert torch.allclose(added, layer.feed_forward(y), atol=2e-5)
    assert kinds == {DenseWeights, MoeWeights}


def test_nothing_is_cloned(models: tuple[Model, Model, PeerModel]) -> None:
    """On one device every split tensor of both parts lies in the memory of the weights that were loaded."""
    whole, owner, peer = models
    for layer, own, its in zip(whole.layers, owner.layers, peer.layers, strict=True):
        parts = [own.mla.heads, its.heads, own.mlp, its.mlp]
        held = {weight.untyped_storage().data_ptr() for weight in _tensors([layer.mla.heads, layer.mlp])}
        assert all(weight.untyped_storage().data_ptr() in held for weight in _tensors(parts))


def _tensors(parts: list[object]) -> list[Tensor]:
    found: list[Tensor] = []
    for part in parts:
        for name in part.__dataclass_fields__:  # type: ignore[attr-defined]  # all of them are dataclasses
            value = getattr(part, name)
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, DenseWeights | PeerExperts):
                found += _tensors([value])
    return found


def test_layers_are_split_as_they_are_read(models: tuple[Model, Model, PeerModel], tmp_path: Path) -> None:
    """A model that is read in parts has the parts of one that was read whole."""
    whole, owner, _ = models
    config = tiny_config(
        num_attention_heads=whole.config.heads, num_key_value_heads=whole.config.heads, n_routed_experts=whole.config.experts
    )
    directory = write_checkpoint(random_tensors(config, named("shared").seed), config, tmp_path / "model")
    splitter = Splitter(CPU)
    read = load_model(directory, part_of=splitter.take)
    peer = splitter.peer_of(read)
    for mine, its in zip(read.layers, owner.layers, strict=True):
        assert torch.equal(mine.mla.output, its.mla.output)  # type: ignore[arg-type]  # tensors, on the CPU
    assert peer.heads + read.layers[0].mla.key_up.shape[0] == whole.config.heads
    assert read.mtp is not None
    assert read.mtp.layer.mla.key_up.shape[0] == whole.config.heads, "the MTP block stays whole"


def test_scales_are_cut_at_their_blocks() -> None:
    """Block-FP8 and packed weights cut by outputs and by inputs have the values of the whole, on the device they go to."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((300, 384), generator=generator).to(torch.float8_e4m3fn)
    fp8 = BlockFp8(values, torch.rand((3, 3), generator=generator) + 0.5)
    codes = torch.randint(0, 16, (8, 640), dtype=torch.uint8, generator=generator)
    packed = GroupInt.pack(codes, torch.rand((8, 10), generator=generator), torch.full((8, 10), 7, dtype=torch.uint8), 4, 64)
    for weight, cuts in ((fp8, ((0, 128), (128, 384))), (packed, ((0, 256), (256, 640)))):
        plain = weight.dequantised(torch.float32)
        for first, end in cuts:
            assert torch.equal(_columns(weight, first, end).dequantised(torch.float32), plain[:, first:end])  # type: ignore[union-attr]
        for first, end in ((0, 128), (128, 300)) if weight is fp8 else ((0, 3), (3, 8)):
            part = _moved(_rows(weight, first, end), CPU)
            assert torch.equal(part.dequantised(torch.float32), plain[first:end])  # type: ignore[union-attr]


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    """One head, or a width of one block, is refused with the number; else the parts are as equal as steps allow."""
    assert [_middle(64, 1, ""), _middle(5, 1, ""), _middle(2048, 128, ""), _middle(384, 128, ""), _middle(256, 128, "")] == [
        32,
        3,
        1024,
        256,
        128,
    ]
    with pytest.raises(BadSetting, match=r"128 values .* steps of 128"):
        _middle(128, 128, "values of a width")
    config = tiny_config(num_attention_heads=1, num_key_value_heads=1)
    directory = write_checkpoint(random_tensors(config, 1), config, tmp_path / "model")
    with pytest.raises(BadSetting, match="one attention head"):
        load_model(directory, part_of=Splitter(CPU).take)
