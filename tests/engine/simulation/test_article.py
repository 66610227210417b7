"""The fit to published rows, what the committed simulation says of the held-out ones, and its pictures and commands."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.commands import WhileReady
from engine.commands.line import run_line
from engine.config import ServerConfig
from engine.errors import BadSetting
from engine.protocol import EngineFace
from engine.simulation.article import ACCEPTED, MEASURED, NEW_TOKENS, acceptance, slowest_keys_share, tokens_a_step
from engine.simulation.chart import chart
from engine.simulation.pipeline import Load
from engine.simulation.sweeps import Curve, Nodes, Picture, Point, run_load, slower, two_nodes

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    return two_nodes()


@pytest.fixture(scope="module")
def committed() -> dict[str, object]:
    found = json.loads((ROOT / "docs/capacity/simulation.json").read_text())
    assert isinstance(found, dict)
    return found


def test_the_acceptance_gives_the_published_count() -> None:
    """In as many steps of three drafts as 1,024 tokens with 665 accepted ones took, 665 are accepted."""
    steps = NEW_TOKENS - ACCEPTED
    assert steps * (tokens_a_step(acceptance(), 3) - 1) == pytest.approx(ACCEPTED)


def test_the_fit_gives_the_rows_that_it_was_made_for(nodes: Nodes) -> None:
    """One session alone is as fast as published without drafts and with three: two equations, two unknowns."""
    for row in MEASURED[:2]:
        step_us = nodes.machine.step_us(nodes.stages, row.depth, row.history)
        assert 1e6 * tokens_a_step(nodes.acceptance, row.depth) / step_us == pytest.approx(row.tokens_per_second)


def test_only_two_rows_are_fitted() -> None:
    """Three rows of ten sessions and the one behind an append stay out of the first fit."""
    assert [row.tokens_per_second for row in MEASURED if row.role == "fit"] == [14.03, 27.9]
    assert sum(row.role != "fit" for row in MEASURED) == 4


def test_slowest_scoring_makes_the_append_row_as_much_slower_as_it_is(nodes: Nodes) -> None:
    """With keys scored that slowly, and the fit made anew, 59,939 rows are 27.9 / 26.85 as slow as 50,023."""
    slow = slower(nodes, slowest_keys_share(nodes.machine, nodes.stages))
    long, short = (slow.machine.step_us(slow.stages, 3, rows) for rows in (59_939, 50_023))
    assert long / short == pytest.approx(27.9 / 26.85)


def test_the_committed_check_is_what_the_code_says(nodes: Nodes, committed: dict[str, object]) -> None:
    """The fitted machine and a row of ten sessions come out as they are in docs/capacity/simulation.json."""
    machine = committed["machine"]
    assert isinstance(machine, dict)
    assert {name: machine[name] for name in ("layer_us", "row_us")} == pytest.approx(
        {"layer_us": nodes.machine.layer_us, "row_us": nodes.machine.row_us}
    )
    rows = committed["check"]
    assert isinstance(rows, list)
    row = next(row for row in rows if row["tokens_per_second"] == 125.26)
    outcome = run_load(nodes, Load(10, 1, 4, 50_023, NEW_TOKENS, nodes.acceptance))
    assert outcome.tokens_per_second == pytest.approx(row["simulated"])


def test_the_page_says_what_the_committed_check_says(committed: dict[str, object]) -> None:
    """Every row of the page's table has the measured and simulated numbers and the error of the JSON."""
    page = (ROOT / "docs/capacity.md").read_text()
    rows = committed["check"]
    assert isinstance(rows, list)
    for row in rows:
        said = f"| {row['tokens_per_second']:.2f} | {row['simulated']:.2f} | {row['error']:+.1%} |"
        assert said in page, said


def test_the_page_says_how_far_doubts_reach(committed: dict[str, object]) -> None:
    """What the committed doubts span is what the page says, and no doubt explains the row that is missed."""
    page = (ROOT / "docs/capacity.md").read_text()
    doubts = committed["doubts"]
    assert isinstance(doubts, list)
    for begin in ("other draws", "acceptance"):
        found = [doubt["simulated"] for doubt in doubts if doubt["name"].startswith(begin)]
        for rates in zip(*found, strict=True):
            assert f"{min(rates):.0f} to {max(rates):.0f}" in page
    assert min(doubt["simulated"][0] for doubt in doubts) > 98.56


def test_the_page_shows_every_committed_picture() -> None:
    """Each SVG beside the JSON is on the page, and is XML with a curve at least."""
    page = (ROOT / "docs/capacity.md").read_text()
    pictures = sorted((ROOT / "docs/capacity").glob("*.svg"))
    assert len(pictures) == 4
    for path in pictures:
        assert f"(capacity/{path.name})" in page
        assert ElementTree.parse(path).getroot().findall(f"{SVG}polyline")


def picture(*curves: Curve, logarithmic: bool = False) -> Picture:
    ticks = ((1.0, "1"), (2.0, "2"), (4.0, "4"))
    return Picture("name", "a < b", "things", ticks, curves, logarithmic)


def test_a_chart_draws_what_it_is_given() -> None:
    """A marker a point, hollow where the point is not sound; higher is faster; a legend entry a curve; names are escaped."""
    points = (Point(1, 10.0, True, 1.0), Point(2, 20.0, True, 1.0), Point(4, 40.0, False, 1.0))
    root = ElementTree.fromstring(chart(picture(Curve("one & two", points))))
    markers = [mark for mark in root.findall(f"{SVG}circle") if mark.find(f"{SVG}title") is not None]
    assert [mark.get("fill") == "white" for mark in markers] == [False, False, True]
    heights = [float(str(mark.get("cy"))) for mark in markers]
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.1)
    texts = [text.text or "" for text in root.findall(f"{SVG}text")]
    assert {"a < b", "one & two", "things"} <= set(texts)
    assert any(text.startswith("hollow: ") for text in texts)
    assert not any("hollow" in (text or "") for text in chart(picture(Curve("one", points[:2]))).decode().splitlines())


def test_a_logarithmic_axis_has_doublings_equally_far_apart() -> None:
    """1, 2 and 4 are as far apart, where on a plain axis 4 is twice as far from 2."""
    points = tuple(Point(x, 1.0, True, 1.0) for x in (1, 2, 4))
    for logarithmic, share in ((True, 1.0), (False, 2.0)):
        path = re.findall(r'polyline points="([^"]+)"', chart(picture(Curve("one", points), logarithmic=logarithmic)).decode())
        places = [float(pair.split(",")[0]) for pair in path[0].split()]
        assert math.isclose((places[2] - places[1]) / (places[1] - places[0]), share, rel_tol=0.01)


async def unserved(
    open_engine: Callable[[], AbstractAsyncContextManager[EngineFace]], config: ServerConfig, while_ready: WhileReady | None = None
) -> None:
    raise AssertionError("a simulation serves nothing")


def line(*words: str) -> int:
    return run_line(("simulate", *words), {}, unserved)


def test_one_load_from_the_command_line(capsys: pytest.CaptureFixture[str], nodes: Nodes) -> None:
    """What a load's flags say is simulated alone, and its throughput printed."""
    assert line("--sessions", "2", "--drafts", "1", "--context", "128K") == 0
    expected = run_load(nodes, Load(2, 1, 1, 131_072, NEW_TOKENS, nodes.acceptance)).steady
    out = capsys.readouterr().out
    assert "131,072 rows" in out
    assert f"{expected:.2f}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sessions", "0"), "--sessions must be at least 1"), (("--drafts", "-1"), "--drafts must be at least 0"),
        (("--context", "0"), "--context must be at least 1"), (("--out", "nowhere"), "--out: nowhere is no directory"),
        (("--out", ".", "--limit", "2"), "give one of the two"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line(words: tuple[str, ...], said: str) -> None:
    """Each is refused by its flag before anything is simulated."""
    with pytest.raises(BadSetting, match=said):
        line(*words)


def test_the_check_tells_when_a_row_costs_more(nodes: Nodes) -> None:
    """Rows that cost 1.7 times as much bring ten sessions with three drafts near what was measured: that is how far the model is off."""
    dear = replace(nodes, machine=replace(nodes.machine, row_us=1.7 * nodes.machine.row_us))
    load = Load(10, 3, 4, 50_023, 256, nodes.acceptance)
    assert run_load(nodes, load).tokens_per_second > 1.3 * 98.56
    assert run_load(dear, load).tokens_per_second == pytest.approx(98.56, rel=0.05)
