"""What is compiled before the first request: all that prompts and turns of any length launch, and nothing of it is left behind."""

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.append_queue
import engine.model.glm
from engine.append import AppendRun
from engine.append_scratch import Scratch
from engine.engine import Engine
from engine.model.glm import Model
from engine.warm_up import turns, warm_up
from kernels.layout import PAGE_KEYS
from kernels.place import BULK_ROWS
from tests.engine.launches import Key, Launches, append, meta_stage, slice_model
from tests.engine.model.parity import make_checkpoint
from tests.engine.runs import small

MILLION = 1 << 20
POSITIONS = (0, 2_050, 5_000, 70_001, 300_032, MILLION - 4_096)
FEW = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 48, 65, 96, 100, 127, 128)
MANY = (129, 160, 257, 300, 511, 512)


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> Model:
    return slice_model(monkeypatch, num_hidden_layers=5)


def _more(asked: set[Key], had: set[Key]) -> list[str]:
    """Each key that is new, by what sets it apart from the nearest one."""
    found = []
    for name, values in asked - had:
        nearest = min((set(values) - set(other) for kernel, other in had if kernel == name), key=len, default=set(values))
        found.append(f"{name}: {sorted(nearest)}")
    return sorted(found)


@pytest.mark.parametrize(
    ("keys", "chunk", "every"),
    [
        ("bf16", 512, 7),
        pytest.param("bf16", 512, 1, marks=pytest.mark.slow),
        pytest.param("bf16", 1024, 3, marks=pytest.mark.slow),  # as docs/benchmarks/gap_million.sh reads
        pytest.param("e4m3", 2048, 1, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_while_a_prompt_is_read(
    shallow: Model, monkeypatch: pytest.MonkeyPatch, keys: str, chunk: int, every: int
) -> None:
    """At true widths, behind any history up to a million rows, a chunk of any rows asks Triton for no kernel that the warm-up's turns did
    not: neither its place nor its length makes one anew."""
    launches = Launches(monkeypatch)
    stage = meta_stage(shallow, chunk, keys)
    warm, first = set[Key](), 0
    for rows in turns(chunk, shallow.config.top_k, MILLION // 2):
        warm |= launches.of(lambda first=first, rows=rows: append(stage, first, rows, MILLION))  # type: ignore[misc]
        first += rows
    assert any(name == "_attend_row" for name, _ in warm), "nothing was launched as for many rows"
    for rows, first in [*product((*FEW, *MANY, chunk), POSITIONS)][::every]:
        asked = launches.of(lambda: append(stage, first, rows, first + rows + rows % 3 * PAGE_KEYS))  # noqa: B023
        assert asked <= warm, f"{rows} rows behind {first} compile {_more(asked, warm)}"


def test_the_stand_in_tells_kernels_apart(shallow: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one row asks for kernels that a whole one does not: what the coverage above is measured by can fail."""
    launches = Launches(monkeypatch)
    stage = meta_stage(shallow, 512)
    whole = launches.of(lambda: append(stage, 0, 512, MILLION))
    assert _more(launches.of(lambda: append(stage, 4096, 1, MILLION)), whole)


@pytest.mark.parametrize("chunk", [64, 512, 2048, 8192])
@pytest.mark.parametrize("room", [1, 20, 700, 5_000, MILLION])
def test_turns_fit_and_shrink(chunk: int, room: int) -> None:
    """The first turn is whole chunks, or what there is room for; all together fit, and there are few of them."""
    found = list(turns(chunk, 2048, room))
    assert sum(found) <= room
    assert found == sorted(found, reverse=True)
    assert len(found) <= 14
    if room == MILLION:
        assert found[0] % chunk == 0
        assert found[0] > 2048
        assert {16, 1} <= set(found)
        shorter = [chunk, *(rows for rows in found[1:] if rows > BULK_ROWS)]
        assert all(later == before // 2 for before, later in pairwise(shorter))


async def test_an_engine_is_warmed_by_those_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn appends the rows it is to append, also the token before that has no row yet, and nothing is held when it is over."""
    appended: list[int] = []
    init = AppendRun.__init__

    def watched(run: AppendRun, stage: Any, memory: Any, tokens: Any, *rest: Any) -> None:
        appended.append(len(tokens))
        init(run, stage, memory, tokens, *rest)

    monkeypatch.setattr(engine.append_queue.AppendRun, "__init__", watched)
    async with Engine.open(make_checkpoint(tmp_path, "shared"), small(append_chunk_rows=64)) as opened:
        await warm_up(opened, opened.stage, sessions=2, context_max=1000)
        wanted = list(turns(64, opened.stage.model.config.top_k, opened.stage.tokens_fit(1000) // 2))
        assert appended == [*wanted, 1, 1]
        assert not opened.sessions
        assert opened.stage.arena.statistics().references == 0


def test_scratch_is_taken_once_an_append() -> None:
    """From its first tile of scores to its last, of every chunk, an append of any length uses one buffer."""
    for end in (300, 70_000, MILLION):
        scratch = Scratch()
        first = scratch.scores(64, PAGE_KEYS, end, torch.device("meta"))
        for keys in (end // 3, end // 2, end):
            rows = 64 if keys <= MILLION // 2 else 32
            later = scratch.scores(rows, -(-keys // PAGE_KEYS) * PAGE_KEYS, end, torch.device("meta"))
            assert later.untyped_storage()._cdata == first.untyped_storage()._cdata
