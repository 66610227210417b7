"""What a pair launches on cards, at true widths and without one: the way through every operation that only a device takes, on torch's meta
device. Whatever would wait for the device there (a value read, a shape that follows from values) raises."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.append import AppendRun
from engine.chain import Chain
from engine.config import EngineConfig
from engine.forced import ForcedAcceptance, ForcedSelection
from engine.model.glm import Model
from engine.model.split import split_model
from engine.pair_append import append_run
from engine.pair_decode import decode_step
from engine.peer import OWNER_SHARE, PeerStage
from engine.placing import rounds_of
from engine.sampling_table import SamplingTable
from engine.stage import Stage
from engine.stage_streams import StageStreams
from kernels.layout import WHOLE, BlockLayout, TableLayout
from memory.append import AppendChunk
from memory.row import key_layout, row_layout
from memory.table import StepTable
from tests.engine.launches import Key, Launches, _Memory, _Stream, slice_model

META, MILLION = torch.device("meta"), 1 << 20
A_PAIRS = {"_copy_words", "_copy_items", "_follow_rows", "tally", "_write"}  # the last two: a choice among few columns, the candidates'
SHAPES = ((1, 1), (1, 4), (2, 1), (16, 1))  # places, rows of each


class Fetched(TorchDispatchMode):
    """Notes what a device would be brought from the host in the middle of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        host = [each for each in args if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.dim() > 0]
        if host and isinstance(made, torch.Tensor) and made.device.type == "meta":
            self.wrong.add(str(func))
        return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **given: zeros(*shape, **given))
    monkeypatch.setattr("memory.rounds.on_cpu", lambda operation, tensor: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(_Stream, "wait", lambda stream, event: None, raising=False)
    return Launches(monkeypatch)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    return slice_model(monkeypatch, num_hidden_layers=5)


def stage_of(whole: Model, placement: str, keys: str = "bf16", *, peered: bool) -> Stage:
    """A stage on one device or two, with neither pools nor arena."""
    model, peer = split_model(whole, META) if peered else (whole, None)
    facts, groups = model.config, model.groups
    layout = BlockLayout(row_layout("q8g64", facts.latent, facts.rope), key_layout(keys, facts.index_width), groups)  # type: ignore[arg-type]
    table, main, nothing = TableLayout(len(groups)), groups[:-1], None
    backend: Any = SimpleNamespace(stream=_Stream)
    streams = StageStreams.of(backend, "stage0", peered=peered)
    rounds = rounds_of(EngineConfig(placement=placement), layout, table)  # type: ignore[arg-type]
    common: Any = {"layout": layout, "table_layout": table, "main_groups": main, "pool": nothing, "rounds": rounds, "copyback": nothing}
    second = None if peer is None else PeerStage(model=peer, streams=streams.peer, arena=nothing, **common)  # type: ignore[arg-type]
    return Stage(
        model=model, first_layer=0, backend=backend, streams=streams, arena=nothing, device=META, ledger=nothing, placement=nothing,  # type: ignore[arg-type]
        append_rows=512, share=OWNER_SHARE if peered else WHOLE, peer=second, forced=ForcedSelection(0.01, facts.top_k),
        forced_acceptance=ForcedAcceptance(0.65, facts.vocabulary), **common,
    )  # fmt: skip


def step(stage: Stage, positions: int, places: int, rows: int) -> None:
    """All that one step launches, and what clears up behind one that failed."""
    made = decode_step(stage, places, positions, rows, None)
    table, sampling = StepTable(places, stage.table_layout, META), SamplingTable(places, META, rows=rows)
    with Fetched() as fetched:
        made._issue(Chain(""), stage.streams, table, sampling)
    assert not fetched.wrong, "a graph would keep the values that were brought when it was captured"
    made.abort(table, session="s")


def append(stage: Stage, first: int, rows: int) -> None:
    """All that an append of one chunk launches."""
    memory: Any = _Memory(stage, first, MILLION)
    if stage.peer is not None:
        pages = torch.empty((stage.layout.key_layers, MILLION // 2048), dtype=torch.int64, device=META)
        memory.peered = SimpleNamespace(peer=SimpleNamespace(pages=SimpleNamespace(table=pages)))
        begin = memory.begin_append

        def begin_both(rows: int, compute: Any) -> AppendChunk:
            return dataclasses.replace(begin(rows, compute), peer=begin(rows, compute))

        memory.begin_append = begin_both
    run: AppendRun = append_run(stage, memory, [1] * rows, None, "s")
    for unit in run.units():
        unit.submit()


def names(keys: set[Key]) -> set[str]:
    return {name for name, _ in keys}


@pytest.mark.parametrize("placement", ["offload", "resident"])
def test_steps_of_a_pair_launch_what_one_device_does(model: Model, launches: Launches, placement: str) -> None:
    """With drafts and without, over short and long histories: one device's kernels and those that copy across, and nothing waits."""
    single, double = (stage_of(model, placement, peered=peered) for peered in (False, True))
    for positions in (65_536, MILLION):
        for places, rows in SHAPES:
            one = launches.of(lambda: step(single, positions, places, rows))  # noqa: B023
            two = launches.of(lambda: step(double, positions, places, rows))  # noqa: B023
            assert names(two) - names(one) <= A_PAIRS, f"{places} places of {rows} rows, {positions} positions"
            assert {"_copy_words", "_copy_items"} <= names(two)


def test_appends_of_a_pair_launch_what_one_device_does(model: Model, launches: Launches) -> None:
    """Chunks that read all of a history and those that read their picks, behind nothing and behind a long one; keys of one byte too."""
    for keys in ("bf16", "e4m3"):
        single, double = (stage_of(model, "offload", keys, peered=peered) for peered in (False, True))
        for first, rows in ((0, 512), (0, 64), (5_000, 512), (70_001, 300), (70_001, 5), (MILLION - 4_096, 1)):
            one = launches.of(lambda: append(single, first, rows))  # noqa: B023
            two = launches.of(lambda: append(double, first, rows))  # noqa: B023
            assert names(two) - names(one) <= {"_copy_words", "_copy_items"}, f"{rows} rows behind {first}"
