"""`/metrics`: what a scraper reads, what docs/metrics.md says of it, and what the dashboard asks for."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from structlog.testing import capture_logs

from engine.config import ServerConfig
from engine.errors import BadRequest
from engine.loop_lag import LoopLag
from engine.measures import Measures
from engine.service import Service
from server import listening
from tests.fake_engine import MEASURES, FakeEngine, words

pytestmark = pytest.mark.both_loops

ROOT = Path(__file__).resolve().parent.parent
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@asynccontextmanager
async def served(engine: FakeEngine | None, **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server on a free port."""
    service = Service(ServerConfig(port=0, **settings))
    if engine is not None:
        service.opened(engine)
    async with listening(service) as address, aiohttp.ClientSession(address) as client:
        yield client


async def scraped(client: aiohttp.ClientSession) -> Values:
    """Every sample by name and labels; none twice."""
    async with client.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    samples = [sample for family in families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def of(found: Values, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


async def test_everything_that_an_engine_measures_is_told() -> None:
    """Each measure comes out under its name, in its unit, with its labels."""
    async with served(FakeEngine([words("x")])) as client:
        found = await scraped(client)
    assert {state: of(found, "forebay_open_requests", state=state) for state in ("waiting", "appending", "decoding")} == {
        "waiting": 2, "appending": 1, "decoding": 3,
    }  # fmt: skip
    assert of(found, "forebay_sessions", kind="stored") == 5
    tokens = [of(found, f"forebay_{kind}_tokens_total") for kind in ("prompt", "cached", "generated")]
    assert tokens == [900, 700, 60]
    assert [of(found, f"forebay_hot_{kind}_total") for kind in ("hits", "misses")] == [750, 250]
    assert of(found, "forebay_ring_reads_total") == 40
    assert [of(found, "forebay_drafts_proposed_total", place=place) for place in ("1", "2")] == [9, 6]
    assert [of(found, "forebay_drafts_accepted_total", place=place) for place in ("1", "2")] == [6, 2]
    buckets = [of(found, "forebay_inter_token_seconds_bucket", le=bound) for bound in ("0.1", "0.2", "+Inf")]
    assert buckets == [5, 8, 9]
    assert (of(found, "forebay_inter_token_seconds_count"), of(found, "forebay_inter_token_seconds_sum")) == (9, 1.5)
    assert of(found, "forebay_stalls_total") == 1
    assert [of(found, f"forebay_copyback_lag_rows{of_whom}") for of_whom in ("", "_most")] == [19, 11]
    assert of(found, "forebay_held_bytes", tier="device", owner="hot") == 4096
    assert [of(found, f"forebay_arena_{what}bytes") for what in ("", "used_", "reserved_")] == [8192, 2048, 1024]
    assert of(found, "forebay_device_budget_bytes") == 10_000
    assert of(found, "forebay_rows", place="ram") == 20_000
    assert of(found, "forebay_stream_busy_seconds_total", stream="stage0.compute") == 1.25
    assert of(found, "forebay_stream_payload_bytes_total", stream="stage0.copyback") == 4096
    assert of(found, "forebay_stream_failures_total", stream="stage0.compute") == 1
    assert of(found, "forebay_info", model="fake", placement="offload") == 1
    assert of(found, "forebay_steps_total") == 12


def test_no_measure_is_forgotten() -> None:
    """Every field of the measures is set in the engine that the test above looks at: one that is added is added there too."""
    assert {field.name for field in fields(Measures) if getattr(MEASURES, field.name) == getattr(Measures(), field.name)} == set()


async def test_requests_are_counted_by_how_they_ended() -> None:
    """Each ended request counts once, by route, status and reason; what a client makes up is no label."""
    scripts: list[Any] = [words("a", "b", finish="length"), [BadRequest("no")], words("x", "y")]
    async with served(FakeEngine(scripts)) as client:
        for body in (HELLO, HELLO, {**HELLO, "stream": True}):
            await (await client.post(CHAT, json=body)).read()
        for path in ("/secret-word", "/v1/sessions/secret-word"):
            await (await client.get(path)).read()
        found = await scraped(client)
    assert of(found, "forebay_requests_total", route=CHAT, status="200", reason="length") == 1
    assert of(found, "forebay_requests_total", route=CHAT, status="200", reason="stop") == 1
    assert of(found, "forebay_requests_total", route=CHAT, status="400", reason="") == 1
    assert of(found, "forebay_requests_total", route="", status="404", reason="") == 1
    assert of(found, "forebay_requests_total", route="/v1/sessions/{session}", status="404", reason="") == 1
    assert of(found, "forebay_time_to_first_token_seconds_count") == of(found, "forebay_end_to_end_seconds_count") == 2
    assert 0 < of(found, "forebay_time_to_first_token_seconds_sum") <= of(found, "forebay_end_to_end_seconds_sum") < 60
    assert not any("secret-word" in value for _, labels in found for _, value in labels)


async def test_a_client_that_leaves_is_an_abort() -> None:
    """A stream whose reader is gone ends with status 499 and the reason abort."""
    gate = asyncio.Event()
    engine = FakeEngine([[*words("a", "b")[:1], gate]])
    async with served(engine) as client:
        async with client.post(CHAT, json={**HELLO, "stream": True}) as response:
            await response.content.readline()
            await engine.generations[0].paused.wait()
        await engine.generations[0].closed.wait()
        found = await scraped(client)
    assert of(found, "forebay_requests_total", route=CHAT, status="499", reason="abort") == 1


async def test_it_answers_before_there_is_an_engine_and_after() -> None:
    """Without an engine the server's own metrics are there and nothing of an engine's; once it has closed, that is gone again."""
    async with served(None) as client:
        found = await scraped(client)
        assert of(found, "forebay_ready") == 0
        assert "forebay_steps_total" not in {name for name, _ in found}
    engine = FakeEngine([words("x")])
    async with served(engine) as client:
        assert of(await scraped(client), "forebay_ready") == 1
        engine.ready = False  # it drains
        assert of(await scraped(client), "forebay_steps_total") == 12
        engine.instruments.open = False
        found = await scraped(client)
    assert "forebay_steps_total" not in {name for name, _ in found}


async def test_the_key_guards_it_unless_it_is_open() -> None:
    """With a key it answers 401 without one, and to a scraper that has it; --metrics-open takes that away for /metrics alone."""
    for settings, status in (({}, 401), ({"metrics_open": True}, 200)):
        async with served(FakeEngine([words("x")]), api_key="k", **settings) as client:
            assert (await client.get("/metrics")).status == status
            assert (await client.get("/metrics", headers={"Authorization": "Bearer k"})).status == 200
            assert (await client.get("/statistics")).status == 401
            assert (await client.get("/v1/live")).status == 401


async def test_openmetrics_is_given_to_those_who_ask() -> None:
    """The same in the other format, which its own parser takes."""
    wanted = "application/openmetrics-text; version=1.0.0"
    async with served(FakeEngine([words("x")])) as client, client.get("/metrics", headers={"Accept": wanted}) as response:
        assert response.content_type == "application/openmetrics-text"
        names = {family.name for family in open_families(await response.text())}
    assert {"forebay_requests", "forebay_inter_token_seconds", "forebay_generated_tokens", "forebay"} <= names


async def test_scrapes_write_no_line() -> None:
    """A scrape every few seconds, and a page's files, leave the log to the requests."""
    async with served(FakeEngine([words("x")])) as client:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))  # a command's test may have left another
        with capture_logs() as logs:
            for path in ("/metrics", "/", "/statistics"):
                await (await client.get(path)).read()
    assert [(line["path"], line["log_level"]) for line in logs if line["event"] == "request.finished"] == [
        ("/metrics", "debug"), ("/", "debug"), ("/statistics", "info"),
    ]  # fmt: skip


async def told_names() -> set[str]:
    """Names of all samples of a server that has done everything."""
    async with served(FakeEngine([words("a", "b")])) as client:
        await (await client.post(CHAT, json=HELLO)).read()
        return {name for name, _ in await scraped(client)}


async def test_the_page_of_metrics_names_all_of_them() -> None:
    """docs/metrics.md has each name once, with its type, and none that no server tells."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(forebay_\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    expected = {f"{name}{end}" for name, kind in rows for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}
    told = {name for name in await told_names() if name.startswith("forebay_")}
    assert {name for name in told if not name.endswith("_created")} == expected


async def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every metric that an expression of the dashboard names exists; every panel has one, and no two share an id or a place."""
    board = json.loads((ROOT / "docs" / "deploy" / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for text in asked for name in re.findall(r"\b(?:forebay|process)_\w+", text)}
    named |= {name for one in board["templating"]["list"] for name in re.findall(r"\bforebay_\w+", one["query"])}
    assert len(named) > 25
    assert named - await told_names() == set()
    assert all(panel["targets"] for panel in panels)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


async def test_the_lag_of_the_loop_is_what_a_timer_was_late() -> None:
    """A timer that is called late counts by how late it was; stopped, none is left."""
    loop, lag = asyncio.get_running_loop(), LoopLag()
    lag._look(loop, loop.time() - 0.3)
    assert 0.299 < lag.recent_s < 5
    assert sum(lag.waits().counts) == 1
    assert lag.waits().sum_s == lag.recent_s
    timer = lag._timer
    assert timer is not None
    assert not timer.cancelled()
    lag.stop()
    assert timer.cancelled()
