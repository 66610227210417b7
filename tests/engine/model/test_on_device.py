"""The model on a card: its functions against the CPU's and plain formulas, rows in any company, weights that stay where they are drawn.

Tiny models in float32 with exact products; the true widths in bfloat16. Run with `-m gpu`; the slice's two layers take 7 GiB.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import NotAdmitted
from engine.model import LayerWeights, Model, ModelConfig, load_model
from engine.model.named import NAMED
from engine.model.quantisation import Scheme, described
from engine.model.random import RandomTensors
from kernels.linear import BlockFp8, GroupInt
from tests.engine.model.flat_run import FlatRun
from tests.engine.model.model_weights import weights_of
from tests.engine.model.parity import Configuration, configurations, make_checkpoint, prompt_ids, transformers_logits
from tests.engine.model.seams import Inputs, assert_near, assert_rows_alone, functions, plain
from tests.engine.model.tiny_models import packable_config, random_tensors, tiny_config, write_checkpoint

pytestmark = pytest.mark.gpu
CARD = "cuda"
FULL_DENSE, SHARED_MOE = 2, 3  # layers of the slice: full and dense, shared and MoE
each_f32 = pytest.mark.parametrize("chosen", [each for each in configurations() if each.rows == "f32"], ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    """The comparison is with float32; a card's default tensor-core mode and reduced sums are not."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {each.name: make_checkpoint(root, each.name) for each in configurations() if each.rows == "f32"}


@pytest.fixture(scope="module")
def part() -> Model:
    """One dense and one MoE layer of the slice, bfloat16."""
    return load_model("glm-5.3-slice", load_format="random", layers=range(FULL_DENSE, SHARED_MOE + 1), device=CARD)


def _outputs(model: Model, given: Inputs) -> dict[str, tuple[torch.Tensor, ...]]:
    return {name: function(given) for name, function in functions(model).items()}


@each_f32
def test_functions_agree_with_the_cpu(chosen: Configuration, checkpoints: dict[str, Path]) -> None:
    """In float32 every function of every layer, the MTP block's included, is the CPU's to 1e-4 of its row."""
    here = load_model(checkpoints[chosen.name])
    there = load_model(checkpoints[chosen.name], device=CARD, dtype=torch.float32)
    assert_near(_outputs(there, Inputs.drawn(there, 64)), _outputs(here, Inputs.drawn(here, 64)), 1e-4)


@each_f32
def test_logits_equal_transformers(chosen: Configuration, checkpoints: dict[str, Path]) -> None:
    """Logits of a prompt well past top-k differ from transformers' by at most 1e-3, and every row's best token is the same."""
    ids = prompt_ids(chosen)
    expected = transformers_logits(checkpoints[chosen.name], ids, chosen.rows, chosen.keys)
    model = load_model(checkpoints[chosen.name], device=CARD, dtype=torch.float32)
    logits = FlatRun(model, 256, rows=chosen.rows, keys=chosen.keys).append(ids.to(CARD)).cpu()
    assert float((logits - expected).abs().max()) <= 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["shared", "odd widths", "block fp8"])
def test_rows_do_not_know_their_company(name: str, dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    """At 1, 2, 3, 4, 8, 16 and 64 rows, in any order, every function gives a row the same bits."""
    model = load_model(checkpoints[name], device=CARD, dtype=dtype)
    assert_rows_alone(model, Inputs.drawn(model, 64))


def test_the_slice_computes_its_formulas(part: Model) -> None:
    """At true widths a bfloat16 dense and a MoE layer are the float32 formulas on the same weights to one percent of a row."""
    given = Inputs.drawn(part, 16)
    assert part.dtype == torch.bfloat16
    assert_near(_outputs(part, given), plain(part, given), 0.01)


def test_rows_of_the_slice_do_not_know_their_company(part: Model) -> None:
    """At true widths, bfloat16: the same bits for a row at 1 to 64 rows and in any order."""
    assert_rows_alone(part, Inputs.drawn(part, 64))


def test_the_head_and_the_block_compute_their_formulas(tmp_path: Path) -> None:
    """Embedding, head and MTP block at true widths, with few experts and one layer: float32 formulas to one percent, rows alone."""
    fields = {**NAMED["glm-5.3-slice"], "num_hidden_layers": 1, "n_routed_experts": 8, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load_model(tmp_path, load_format="random", device=CARD)
    given = Inputs.drawn(model, 16)
    assert_near(_outputs(model, given), plain(model, given), 0.01)
    assert_rows_alone(model, Inputs.drawn(model, 64))


def test_fp8_weights_stay_and_compute(tmp_path: Path) -> None:
    """Block-FP8 products read what is stored: kept on the card, within 1e-4 of the CPU's dequantised float32, one percent in bfloat16."""
    config = tiny_config(hidden_size=160, q_lora_rank=136, kv_lora_rank=128, moe_intermediate_size=128, intermediate_size=200)
    directory = write_checkpoint(random_tensors(config, 3), config, tmp_path, fp8=True, block=(128, 128), dtype=torch.bfloat16)
    here = load_model(directory)
    there = load_model(directory, device=CARD, dtype=torch.float32)
    moe = there.layers[1].mlp
    assert isinstance(there.layers[1].mla.query_down, BlockFp8)
    assert isinstance(moe.gate_up, BlockFp8)  # type: ignore[union-attr]  # layer 1 is not dense
    assert_near(_outputs(there, Inputs.drawn(there, 64)), _outputs(here, Inputs.drawn(here, 64)), 1e-4)
    narrow = load_model(directory, device=CARD)
    assert (narrow.dtype, narrow.head.dtype) == (torch.bfloat16, torch.bfloat16)  # type: ignore[union-attr]
    given = Inputs.drawn(narrow, 24)
    assert_near(_outputs(narrow, given), plain(narrow, given), 0.01)
    assert_rows_alone(narrow, Inputs.drawn(narrow, 64))


def test_integers_stay_and_compute(tmp_path: Path) -> None:
    """Packed products read what is stored: kept on the card, within 1e-4 of the CPU's float32, one percent in bfloat16; rows alone."""
    schemes = (Scheme(4, 32, True, (r"re:.*\.experts\..*",)), Scheme(8, 32, False, (r"re:.*\.(self_attn|mlp)\.[a-z_]*proj.*",)))
    fields = packable_config() | {"quantization_config": described(schemes, ())}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.read(fields)
    drawn = RandomTensors(config, mtp=True, dtype=torch.bfloat16, device=torch.device("cpu"))
    stored = {name: drawn.read(name) for name in drawn.names}
    for name in stored:
        if name.endswith("weight_scale"):  # powers of two: multiplied out on the CPU they are not rounded
            stored[name] = torch.exp2(stored[name].float().log2().round()).bfloat16()
    save_file(stored, tmp_path / "model.safetensors")
    here, there = load_model(tmp_path), load_model(tmp_path, device=CARD, dtype=torch.float32)
    assert isinstance(there.layers[1].mlp.gate_up, GroupInt)  # type: ignore[union-attr]  # layer 1 is not dense
    assert isinstance(there.layers[1].mla.query_down, GroupInt)
    assert_near(_outputs(there, Inputs.drawn(there, 64)), _outputs(here, Inputs.drawn(here, 64)), 1e-4)
    narrow = load_model(tmp_path, device=CARD)
    given = Inputs.drawn(narrow, 24)
    assert_near(_outputs(narrow, given), plain(narrow, given), 0.01)
    assert_rows_alone(narrow, Inputs.drawn(narrow, 64))


def test_random_weights_are_the_same_bits(part: Model) -> None:
    """Drawn again, alone or with its neighbour, a layer has the same bits; another layer has others; all lie on the card, contiguous."""
    again = load_model("glm-5.3-slice", load_format="random", layers=range(SHARED_MOE, SHARED_MOE + 1), device=CARD)
    one, other = weights_of(part.layers[1]), weights_of(again.layers[0])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(part.layers[0].mla.key_up, part.layers[1].mla.key_up)
    assert all(tensor.is_contiguous() and tensor.device.type == "cuda" for tensor in weights_of(part).values())


def test_drawing_holds_no_second_copy() -> None:
    """Loading the slice's MoE layer never holds more than its own bytes and two of its largest stored tensors."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model("glm-5.3-slice", load_format="random", layers=range(SHARED_MOE, SHARED_MOE + 1), device=CARD)
    held = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(model).values())
    assert held > 5 * 10**9
    assert torch.cuda.max_memory_allocated() - before - held <= 2 * 2 * 6144 * 16_384


def test_the_whole_model_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.4 TB of random weights are refused before one tensor is drawn."""
    monkeypatch.setattr(RandomTensors, "read", lambda self, name: pytest.fail(f"{name} was drawn"))
    with pytest.raises(NotAdmitted, match=r"need 1,403.4 GiB, and [\d.]+ GiB are free on cuda"):
        load_model("glm-5.3", load_format="random", device=CARD)


def test_a_full_card_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory while weights are read is a refusal with numbers, not a trace."""

    def full(*asked: object, **options: object) -> LayerWeights:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much")

    monkeypatch.setattr(LayerWeights, "read", full)
    with pytest.raises(NotAdmitted, match=r"the weights of glm-5.3-slice do not fit on cuda: [\d,]+ of its [\d,]+ bytes were left"):
        load_model("glm-5.3-slice", load_format="random", layers=range(SHARED_MOE, SHARED_MOE + 1), device=CARD)
