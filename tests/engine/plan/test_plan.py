"""The arithmetic of `forebay plan`: the design's figures, published sizes, and what a running engine holds."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.commands.line import run_line
from engine.config import EngineConfig
from engine.convert import Recipe, convert
from engine.engine import Engine
from engine.errors import BadSetting
from engine.model.bytes import held_bytes
from engine.model.config import ModelConfig
from engine.model.glm import Model, load_model
from engine.model.named import NAMED
from engine.model.weights import WeightReader
from engine.plan import Ask, Boxes, Plan, WeightForm, make_plan
from engine.plan.stages import Cuts, Rules, StagePlan
from engine.plan.weights import checkpoint_bytes, layer_bytes
from engine.sampling import Sampling
from kernels.layout import BLOCK_ROWS
from tests.engine.model.tiny_models import packable_config, random_tensors, tiny_config, write_checkpoint

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "engine" / "demo_model"
GLM = ModelConfig.read(NAMED["glm-5.3"])
M = 1 << 20
MIB, GIB = 1 << 20, 1 << 30
ONE_BOX = Boxes(nodes=1, cards=1, cards_per_stage=1, ram_bytes=4 << 40, card_bytes=4 << 40)


def planned(tokens: int = M, sessions: int = 15, *, boxes: Boxes = ONE_BOX, mtp: bool = False, engine: EngineConfig | None = None,
            form: WeightForm | None = None, **ask: object) -> Plan:  # fmt: skip
    asked = Ask(tokens, sessions, form or WeightForm("bf16"), mtp, **ask)  # type: ignore[arg-type]  # the dataclass checks names
    return make_plan("glm-5.3", GLM, engine or EngineConfig(), boxes, asked)


def test_figures_of_one_layer() -> None:
    """50,000 rows are 31.281 MiB, a selection 1.28125 MiB, a hot cache of 32,768 rows 20.5 MiB: 656 bytes a row."""
    assert planned(50_000).row_bytes == 656
    assert round(planned(50_000).history_bytes / 78 / MIB, 3) == 31.281
    assert planned(2048).history_bytes / 78 / MIB == 1.28125
    [stage] = planned(50_000).stages
    assert stage.session.hot_rows / 78 / MIB == 20.5


def test_figures_of_whole_histories() -> None:
    """Two replicas of 78 layers: 4.765 GiB at 50,000 tokens, 99.94 GiB at 1M, 1,499.06 GiB for fifteen of those."""
    assert round(2 * planned(50_000).history_bytes / GIB, 3) == 4.765
    [node] = planned(M, replicas=2).nodes
    assert round(node.session_rows / GIB, 2) == 99.94
    assert round(15 * node.session_rows / GIB, 2) == 1499.06


def test_figures_of_fifteen_hot_caches() -> None:
    """Fifteen hot caches of 32,768 rows in 78 layers on both cards of each of eight stages are 46.85 GiB."""
    plan = planned(M, boxes=Boxes())
    assert len(plan.stages) == 8
    assert round(15 * sum(2 * stage.session.hot_rows for stage in plan.stages) / GIB, 2) == 46.85


def test_figures_of_thirty_sessions_in_one_mirror() -> None:
    """30 sessions of 1M in one mirror: 1,499.06 GiB of rows, 1,518 with the MTP block's, and 165 of bf16 keys of 22 full layers."""
    [rows], [all_rows] = planned(M, 30).nodes, planned(M, 30, mtp=True).nodes
    assert round(30 * rows.session_rows / GIB, 2) == 1499.06
    assert round(30 * all_rows.session_rows / GIB) == 1518
    assert 30 * all_rows.session_keys / GIB == 165


def test_keys_of_a_million_positions() -> None:
    """Index keys of a session at 1M are 5.5 GiB in bf16 and 2.8 in e4m3, on one card; two cards hold half of the pages each."""
    assert planned(M, mtp=True).stages[0].session.keys / GIB == 5.5
    assert round(planned(M, mtp=True, keys="e4m3").stages[0].session.keys / GIB, 1) == 2.8
    halves = planned(M, mtp=True, boxes=Boxes(nodes=1, cards=2, card_bytes=4 << 40, ram_bytes=4 << 40))
    assert halves.stages[0].session.keys / GIB == 2.75


def test_slot_maps_of_a_million_positions() -> None:
    """A slot map of 1M positions is 4 MiB a selection group: 88 MiB for 22, beside 2 x 128 KiB a group for what the slots hold."""
    [stage] = planned(M, mtp=True).stages
    assert stage.session.maps == 22 * (4 * MIB + 2 * 128 * 1024 + 16 + 48)  # hand, and rounding of each buffer to 64


def test_published_checkpoints_come_out_to_the_byte() -> None:
    """The official FP8 files are 755,617,140,416 bytes; in bf16 there are 753,329,940,480 elements, 76 x 256 of them in float32."""
    assert checkpoint_bytes(GLM, WeightForm("fp8"), mtp=True) == 755_617_140_416
    assert checkpoint_bytes(GLM, WeightForm("bf16"), mtp=True) == 2 * 753_329_940_480 + 2 * 76 * 256


def test_int4_experts_are_four_bits_and_a_scale_a_group() -> None:
    """An expert matrix of 2,048 x 6,144 in groups of 64 is half a byte a value and 2 bytes a group, three matrices an expert."""
    held = layer_bytes(GLM, WeightForm("int4"), mtp=True, cards=1)["40"]
    assert held.experts == 256 * 3 * (2048 * 6144 // 2 + 2 * 2048 * 6144 // 64)
    assert layer_bytes(GLM, WeightForm("int4"), mtp=True, cards=2)["40"].experts == held.experts // 2
    mixed = layer_bytes(GLM, WeightForm("mix", 128), mtp=True, cards=1)["40"]
    assert mixed.experts == 256 * 3 * (2048 * 6144 // 2 + 2 * 2048 * 6144 // 128)
    assert layer_bytes(GLM, WeightForm("int4"), mtp=True, cards=1)["78"].experts == 256 * 3 * 2048 * 6144 * 2  # the MTP block stays


def test_weights_alone_that_do_not_fit_are_named() -> None:
    """FP8 on 16 cards of 48 GiB: a stage of ten layers is over what a card has, which is said before any session is counted."""
    plan = planned(M, 1, boxes=Boxes(), mtp=True, form=WeightForm("fp8"))
    assert (plan.fits, plan.sessions_max, plan.first.what, plan.tokens_max) == (False, 0, "weights", 0)
    assert plan.first.room_bytes < 0


def test_int4_on_the_two_nodes_holds_fifteen_and_thirty() -> None:
    """With four-bit experts 16 cards of 48 GiB and 2 TiB of RAM hold 15 sessions of 1M in one mirror, 30 with e4m3 keys, two resident."""
    for sessions, keys in ((15, "bf16"), (30, "e4m3")):
        plan = planned(M, sessions, boxes=Boxes(), mtp=True, form=WeightForm("int4"), keys=keys)
        assert plan.fits
        assert plan.first.what == ("VRAM" if sessions == 15 else "RAM")
        assert plan.resident_sessions == 2
    assert not planned(M, 30, boxes=Boxes(), mtp=True, form=WeightForm("int4")).fits
    assert not planned(M, 30, boxes=Boxes(), mtp=True, form=WeightForm("int4"), replicas=2).fits  # 2 x 1,683 GiB are not in 2 TiB


def test_what_is_left_is_just_enough() -> None:
    """At the number of sessions that the plan allows every card and node holds them, and what binds first holds no more."""
    plan = planned(200_000, 40, boxes=Boxes(), mtp=True, form=WeightForm("int4"), keys="e4m3")
    most = plan.sessions_max
    for stage in plan.stages:
        assert stage.fixed + most * stage.session.card <= plan.boxes.usable_card_bytes
    for node in plan.nodes:
        assert most * node.session_bytes <= node.arena_bytes
    assert plan.first.room_bytes < (most + 1) * plan.first.session_bytes


def test_the_longest_history_is_just_enough() -> None:
    """The tokens that the asked sessions may have each fit them, and a block more does not."""
    plan = planned(400_000, 60, boxes=Boxes(), mtp=True, form=WeightForm("int4"))
    rules = Rules(GLM, EngineConfig(), WeightForm("int4"), True, 2)

    def fits(tokens: int) -> bool:
        sessions = [(stage, rules.session(stage.layout, tokens)) for stage in plan.stages]
        cards = all(stage.fixed + 60 * each.card <= plan.boxes.usable_card_bytes for stage, each in sessions)
        nodes = all(60 * sum(each.host for stage, each in sessions if stage.node == node.node) <= node.arena_bytes for node in plan.nodes)
        return cards and nodes

    assert 0 < plan.tokens_max < M
    assert fits(plan.tokens_max)
    assert not fits(plan.tokens_max + BLOCK_ROWS)


def test_every_layer_is_in_one_stage_and_the_fullest_card_is_no_fuller_than_even_cuts_make_it() -> None:
    """Stages cover the layers in order, once; the largest load is at most that of cuts every ten layers."""
    rules = Rules(GLM, EngineConfig(), WeightForm("int4"), True, 2)
    stages = Cuts(rules, 8, 4, M).even(15)
    assert [layer for stage in stages for layer in stage.layers] == list(range(78))
    assert [stage.node for stage in stages] == [0, 0, 0, 0, 1, 1, 1, 1]

    def load(layers: range) -> int:
        layout = rules.layout(layers)
        return rules.stage_weights(layers).card + rules.append_ring(layout) + 15 * rules.session(layout, M).card

    even = max(load(range(first, min(first + 10, 78))) for first in range(0, 78, 10))
    assert max(stage.fixed + 15 * stage.session.card for stage in stages) <= even


SMALL_BOXES = {
    "VRAM": Boxes(nodes=2, cards=2, cards_per_stage=1, card_bytes=3 * GIB // 2, ram_bytes=4 << 40),
    "RAM": Boxes(nodes=2, cards=1, cards_per_stage=1, card_bytes=8 * GIB, ram_bytes=256 * MIB),
    "uneven": Boxes(nodes=3, cards=1, cards_per_stage=1, card_bytes=2 * GIB, ram_bytes=128 * MIB),
}


@pytest.mark.parametrize("box", SMALL_BOXES)
@pytest.mark.parametrize("tokens", [700, 4000])
def test_at_most_is_what_the_best_of_all_cuts_holds_whatever_is_asked(box: str, tokens: int) -> None:
    """No cut of a model of seven layers holds more; so many fit when asked for, one more does not; asking for 1 says the same number."""
    boxes, types = SMALL_BOXES[box], ["full", "shared", "full", "shared", "shared", "full", "shared"]
    layers = {"num_hidden_layers": 7, "indexer_types": types, "mlp_layer_types": ["dense"] + 6 * ["sparse"]}
    config = ModelConfig.read(tiny_config(**layers))
    engine = EngineConfig(hot_rows=512, append_chunk_rows=256, draft_depth=0)

    def at_most(sessions: int) -> Plan:
        return make_plan("tiny", config, engine, boxes, Ask(tokens, sessions, WeightForm("f32"), True))

    rules, usable, arena = Rules(config, engine, WeightForm("f32"), True, 1), boxes.usable_card_bytes, boxes.arena_bytes_max
    best = 0
    for inner in combinations(range(1, 7), boxes.stages - 1):
        parts = [range(first, stop) for first, stop in pairwise((0, *inner, 7))]
        held = [rules.session(rules.layout(part), tokens) for part in parts]
        fixed = [rules.stage_weights(part).card + rules.append_ring(rules.layout(part)) for part in parts]
        cards = min((usable - each) // session.card for each, session in zip(fixed, held, strict=True))
        step = boxes.stages_a_node
        nodes = min(arena // sum(each.host for each in held[first : first + step]) for first in range(0, len(held), step))
        best = max(best, min(cards, nodes))
    assert best > 0
    plans = {sessions: at_most(sessions) for sessions in (1, best, best + 1)}
    assert {plan.sessions_max for plan in plans.values()} == {best}
    assert [plan.fits for plan in plans.values()] == [True, True, False]


def test_at_most_of_a_named_model_does_not_depend_on_what_is_asked() -> None:
    """GLM-5.3 on 16 cards of 32 GiB: asked for 1, for the most or for one more, the same number fits, and one more does not."""
    boxes = Boxes(card_bytes=32 * GIB)
    most = planned(M, 1, boxes=boxes, mtp=True, form=WeightForm("int4")).sessions_max
    assert most > 1
    plans = [planned(M, sessions, boxes=boxes, mtp=True, form=WeightForm("int4")) for sessions in (most, most + 1)]
    assert [(plan.sessions_max, plan.fits) for plan in plans] == [(most, True), (most, False)]


def test_more_stages_than_layers_leave_cards_empty() -> None:
    """A model of four layers on eight single cards makes four stages."""
    tiny = ModelConfig.read(tiny_config())
    boxes = Boxes(nodes=1, cards=8, cards_per_stage=1)
    plan = make_plan("tiny", tiny, EngineConfig(), boxes, Ask(1000, 2, WeightForm("f32"), True))
    assert [len(stage.layers) for stage in plan.stages] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Boxes(cards=3), "--cards-per-stage 2"), (lambda: Boxes(nodes=0), "--nodes"), (lambda: Boxes(card_bytes=0), "--vram"),
        (lambda: WeightForm("int3"), "--weights"), (lambda: WeightForm("int4", 48), "--weight-group"),  # type: ignore[arg-type]
        (lambda: planned(0), "--context"), (lambda: planned(M + 1), "more than the model's 1048576"),
        (lambda: planned(M, 0), "--sessions"), (lambda: planned(M, replicas=3), "--mirror-replicas"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_named(wrong: object, said: str) -> None:
    """Each refused value is one line that begins with its flag."""
    with pytest.raises(BadSetting, match=said):
        wrong()  # type: ignore[operator]


def held_of(model: Model) -> int:
    """Bytes of a model's weights, each once: a layer's joined product is a view of its parts."""
    blocks = [[layer.mla, layer.input_norm, layer.output_norm, layer.indexer, layer.mlp] for layer in model.row_layers]
    mtp = [] if model.mtp is None else [model.mtp.embedding_norm, model.mtp.hidden_norm, model.mtp.join, model.mtp.head_norm]
    return held_bytes([*blocks, *mtp, model.embedding, model.norm, model.head])


def test_stages_hold_the_bytes_that_loading_them_takes(tmp_path: Path) -> None:
    """Each part of a tiny model, cut in three, is to the byte what the plan counts for it."""
    config = tiny_config()
    write_checkpoint(random_tensors(config, 1), config, tmp_path)
    rules = Rules(ModelConfig.read(config), EngineConfig(row_format="f32"), WeightForm("f32"), True, 1)
    for layers in (range(1), range(1, 3), range(3, 4), range(4)):
        assert held_of(load_model(tmp_path, layers=layers)) == rules.stage_weights(layers).whole


@pytest.mark.parametrize("kinds", [("experts",), ("experts", "mlp"), ("experts", "mlp", "attention")])
def test_a_converted_fp8_directory_is_counted_as_its_files_are(
    kinds: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What its config leaves plain is counted plain: the bytes of the tensors written, and those that loading them on a device takes."""
    config = packable_config()
    source = write_checkpoint(random_tensors(config, 1), config, tmp_path / "source", dtype=torch.bfloat16)
    convert(source, tmp_path / "out", Recipe(dict.fromkeys(kinds, "fp8")))  # type: ignore[arg-type]  # a form
    written = sum(tensor.nbytes for file in (tmp_path / "out").glob("*.safetensors") for tensor in load_file(file).values())
    words = ("plan", str(tmp_path / "out"), "--nodes", "1", "--cards", "1", "--context", "2048", "--sessions", "1", "--json")
    assert run_line(words, {}, never_served) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["asked"]["weights"], found["checkpoint_bytes"]) == ("fp8", written)
    monkeypatch.setattr(WeightReader, "_keeps_stored", lambda self: True)
    assert found["stages"][0]["weight_bytes"] == held_of(load_model(tmp_path / "out", dtype=torch.bfloat16))


async def never_served(*_: object) -> None:
    raise AssertionError("a plan serves nothing")


def test_the_published_lists_names_change_nothing() -> None:
    """The official files' list names modules that are plain anyway, and some that do not exist: the same bytes. It may name a layer."""
    own = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

    def counted(fields: Mapping[str, object], listed: list[str]) -> tuple[ModelConfig, WeightForm]:
        config = ModelConfig.read({**fields, "quantization_config": own | {"modules_to_not_convert": listed}})
        return config, WeightForm("fp8", quantisation=config.quantisation)

    plain = ["lm_head", "model.embed_tokens", *(f"model.layers.{layer}.mlp.gate" for layer in range(3, 79))]
    listed = [*plain, *(f"model.layers.{layer}.self_attn.indexers_proj" for layer in range(79))]
    assert checkpoint_bytes(*counted(NAMED["glm-5.3"], listed), mtp=True) == 755_617_140_416
    tiny = packable_config()
    held = layer_bytes(*counted(tiny, ["model.layers.4"]), mtp=True, cards=1)
    bf16, fp8 = (layer_bytes(ModelConfig.read(tiny), WeightForm(form), mtp=True, cards=1) for form in ("bf16", "fp8"))  # type: ignore[arg-type]
    assert (held["4"], held["3"]) == (bf16["4"], fp8["3"])
    assert bf16["4"].whole > fp8["4"].whole


def plan_of(model: Path, config: EngineConfig, tokens: int, sessions: int) -> StagePlan:
    shape = ModelConfig.read(model)
    boxes = Boxes(nodes=1, cards=1, cards_per_stage=1)
    [stage] = make_plan("model", shape, config, boxes, Ask(tokens, sessions, WeightForm("f32"), True)).stages
    return stage


@pytest.mark.parametrize("recorded", ["h200_decode_1m", "h200_decode_50k", "h200_append"])
def test_a_card_held_what_was_planned(recorded: str) -> None:
    """What one session of glm-5.3-slice held on an H200, at up to 1,047,279 rows and in either placement, is within 0.1% of the plan."""
    found = json.loads((ROOT / "docs" / "benchmarks" / f"{recorded}.json").read_text())
    slice_, chunk_rows = ModelConfig.read(NAMED["glm-5.3-slice"]), found["plan"]["engine"]["append_chunk_rows"]
    assert {arm["placement"] for arm in found["arms"]} == {"offload", "resident"}
    for arm in found["arms"]:
        engine = EngineConfig(placement=arm["placement"], append_chunk_rows=chunk_rows)
        rows = arm["context_rows"]
        [stage] = make_plan("slice", slice_, engine, ONE_BOX, Ask(rows, 1, WeightForm("bf16"), mtp=True)).stages
        assert arm["device_bytes"] == pytest.approx(stage.append_ring + stage.session.card, rel=1e-3)


@pytest.mark.parametrize("placement", ["offload", pytest.param("resident", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "tokens", "depth"), [pytest.param("tiny", 1216, 0, marks=pytest.mark.slow), ("tiny", 1210, 2), ("demo", 512, 0)]
)
async def test_a_running_engine_holds_what_was_planned(name: str, tokens: int, depth: int, placement: str, tmp_path: Path) -> None:
    """Weights, device ledger and arena of an engine with three sessions are within 2% of the plan, in either placement."""
    model, rows = DEMO, "q8g64"
    if name == "tiny":
        config = tiny_config()
        write_checkpoint(random_tensors(config, 1), config, tmp_path)
        model, rows = tmp_path, "f32"
    settings = EngineConfig(device="cpu", host_memory_bytes=256 * MIB, hot_rows=512, draft_depth=depth, append_chunk_rows=256)
    settings = replace(settings, placement=placement, row_format=rows)  # type: ignore[arg-type]
    stage, sessions = plan_of(model, settings, tokens, 3), 3
    prompt = [token % 90 for token in range(tokens - 8)]
    async with Engine.open(model, settings) as engine:
        for _ in range(sessions):
            session = await engine.create_session()
            await engine.generate(prompt, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True), session=session).complete()
        device = engine.stage.ledger.total("device").allocated_bytes
        arena = engine.stage.arena.statistics()
        weights = held_of(engine.stage.model)
    assert device == pytest.approx(stage.append_ring + sessions * stage.session.card, rel=0.02)
    assert (arena.blocks - arena.free + arena.reserved) * arena.block_bytes == pytest.approx(sessions * stage.session.host, rel=0.02)
    assert weights == pytest.approx(stage.weights.whole, rel=0.02)
