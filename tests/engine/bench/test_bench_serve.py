"""Loads on a server: what is sent, what is heard of the answers, and what counts."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from engine.bench.heard import Heard, HeardReader, StreamFailed
from engine.bench.load import Length, Load, conversations
from engine.bench.serving import Served, as_json, drive, table
from engine.bench.spread import percentile, spread_of
from engine.commands.bench_serve import COMMAND
from engine.commands.line import run_line
from engine.config import ServerConfig
from engine.errors import BadSetting, NotAdmitted, SessionBroken
from engine.gate.process import server_process
from engine.remote import Unreachable
from engine.service import Service
from server import listening
from tests.engine.grammar.random_model import random_model
from tests.fake_engine import FakeEngine, Item, words


@asynccontextmanager
async def serving(engine: FakeEngine, **settings: object) -> AsyncIterator[ServerConfig]:
    """Settings that lead to a server of this engine."""
    service = Service(ServerConfig(port=0, **settings))  # type: ignore[arg-type]  # a test's own keywords
    service.engine = engine
    async with listening(service) as address:
        yield ServerConfig(port=urlsplit(address).port or 0, **settings)  # type: ignore[arg-type]


def quiet(title: str, done: int, total: int) -> None:
    assert done >= 0


class Held:
    """Answers that all wait until so many are asked for at once; counts the most that were."""

    def __init__(self, asked: int) -> None:
        self.gate = asyncio.Event()
        self.most = self._open = 0
        self._asked = asked

    def __call__(self) -> Iterator[Item]:
        self._open += 1
        self.most = max(self.most, self._open)
        if self._open == self._asked:
            self.gate.set()
        yield self.gate
        first, last = words("a", "b", finish="length")
        yield first
        self._open -= 1
        yield last


def test_a_load_is_the_same_every_time() -> None:
    """Equal loads are equal conversations; another seed is another; lengths stay in their range and all begin with the shared ids."""
    load = Load(sessions=20, turns=3, prompt_tokens=Length(5, 9), new_tokens=Length(1, 4), shared_tokens=11, rate=4.0)
    made = list(conversations(load))
    assert made == list(conversations(load))
    assert made != list(conversations(Load(sessions=20, turns=3, shared_tokens=11, rate=4.0, seed=2)))
    assert len({each.turns[0].prompt[:11] for each in made}) == 1
    assert len({each.turns[0].prompt for each in made}) == 20
    for each in made:
        assert all(5 <= len(turn.prompt) - 11 * (number == 0) <= 9 and 1 <= turn.new_tokens <= 4 for number, turn in enumerate(each.turns))
    assert {len(turn.prompt) for each in made for turn in each.turns[1:]} == {5, 6, 7, 8, 9}


def test_arrivals_are_at_the_rate() -> None:
    """An open load's conversations begin in order and, over many, as often as asked; a closed one's all may begin at once."""
    begins = [each.begins_s for each in conversations(Load(sessions=2_000, rate=50.0, prompt_tokens=Length(1, 1)))]
    assert begins == sorted(begins)
    assert begins[0] == 0.0
    assert 36 < begins[-1] < 44  # 40 s, and four standard deviations of 0.9 s
    assert {each.begins_s for each in conversations(Load())} == {0.0}


def event(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_what_is_heard_of_a_stream() -> None:
    """Times count from when the request was due, gaps lie between events, and tokens are what usage says, not events."""
    reader = HeardReader(10.0)
    reader.take(10.5, event(choices=[{"text": "a", "token_ids": [1, 2]}]))
    reader.take(10.6, event(choices=[{"text": "", "token_ids": [3]}]))
    reader.take(10.9, event(choices=[{"text": "b", "finish_reason": "length"}]))
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    reader.take(11.0, event(choices=[], usage=usage))
    reader.take(12.1, b"[DONE]")
    heard = reader.heard()
    assert (heard.prompt_tokens, heard.cached_tokens, heard.new_tokens, heard.token_ids) == (7, 4, 9, (1, 2, 3))
    assert [round(gap, 6) for gap in heard.gaps_s] == [0.1, 0.3]
    assert [round(one, 6) for one in (heard.first_s, heard.total_s, heard.token_s)] == [0.5, 2.1, 0.2]


def heard_of(payloads: list[bytes]) -> Heard:
    reader = HeardReader(0.0)
    for payload in payloads:
        reader.take(1.0, payload)
    return reader.heard()


def test_streams_that_are_no_answers() -> None:
    """An error, what is not JSON, a stream without tokens, usage or end: each is a failure that says so."""
    text, usage = event(choices=[{"text": "a"}]), event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 1})
    cases = [
        ([text, usage], "without"),
        ([text, b"[DONE]"], "no usage"),
        ([usage, b"[DONE]"], "no tokens"),
        ([event(error={"message": "x"})], "x"),
    ]
    for payloads, reason in [*cases, ([b"nonsense"], "not one")]:
        with pytest.raises(StreamFailed, match=reason):
            heard_of(payloads)


def test_spreads() -> None:
    """Percentiles are values that were measured, and nothing has no spread."""
    values = [float(value) for value in range(1, 201)]
    assert [percentile(values, percent) for percent in (50, 90, 99, 100)] == [100.0, 180.0, 198.0, 200.0]
    assert spread_of([]) is None
    assert spread_of([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}


def test_what_counts_as_good() -> None:
    """A request is good within every goal; failed ones are never, and their times are in no percentile."""
    fast, slow = (Heard(0.0, None, first, 1.0, (0.1,), 5, 0, 3) for first in (0.1, 0.6))
    found = Served(Load(), "m", 2.0, (fast, slow, Heard(0.0, "status 429: no")), {"ttft": 500.0, "e2e": 1000.0})
    assert (found.good, found.failed) == (1, 1)
    made = as_json(found, {})
    assert (made["good_per_second"], made["requests_per_second"], made["new_tokens"]) == (0.5, 1.0, 6)
    assert made["ttft_ms"]["max"] == 600.0
    assert made["errors"] == {"status 429: no": 1}
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(found))
    assert "2 of 3 requests answered" in console.export_text()
    console.file.close()


async def test_a_closed_loop_has_so_many_at_once() -> None:
    """Two clients have two requests at once and never three; each turn holds everything said before it."""
    held = Held(2)
    engine = FakeEngine([held])
    load = Load(sessions=3, turns=2, prompt_tokens=Length(4, 4), new_tokens=Length(2, 2), concurrency=2)
    async with serving(engine) as config:
        found = await drive(load, config, {}, quiet)
    assert (len(engine.calls), held.most, found.failed, found.model) == (6, 2, 0, "fake")
    prompts = [tuple(call.prompt) for call in engine.calls]  # type: ignore[arg-type]
    for each in conversations(load):
        first = each.turns[0].prompt
        assert first in prompts
        assert (*first, 100, 101, *each.turns[1].prompt) in prompts
    assert sum(one.new_tokens for one in found.requests) == 12
    assert engine.calls[0].sampling.ignore_eos
    assert engine.calls[0].sampling.max_tokens == 2


async def test_an_open_loop_sends_whoever_still_waits() -> None:
    """None is answered before all five are sent, and the wait counts from when each was due."""
    async with serving(FakeEngine([Held(5)])) as config:
        load = Load(sessions=5, rate=500.0, prompt_tokens=Length(2, 2), new_tokens=Length(2, 2))
        found = await drive(load, config, {}, quiet)
    assert found.failed == 0
    due = {each.begins_s for each in conversations(load)}
    assert {one.due_s for one in found.requests} == due


async def test_failures_end_their_conversation() -> None:
    """A refusal and a stream that breaks off are counted by what was said; the others go on."""
    broken = [*words("a", "b")[:1], SessionBroken("layer 3 broke")]
    engine = FakeEngine([[NotAdmitted("full", retry_after_s=1.0)], broken, words("a", "b", finish="length")])
    async with serving(engine) as config:
        found = await drive(Load(sessions=3, turns=2, concurrency=1, new_tokens=Length(2, 2)), config, {}, quiet)
    errors = as_json(found, {})["errors"]
    assert len(engine.calls) == 4
    assert (found.failed, len(found.answered)) == (2, 2)
    assert any("429" in error and "full" in error for error in errors)
    assert any("layer 3 broke" in error for error in errors)


async def test_nobody_there_and_a_wrong_key() -> None:
    """A closed port and a refused key are one line each, before anything is sent."""
    async with serving(FakeEngine([words("a")]), api_key="right") as config:
        with pytest.raises(BadSetting, match="401"):
            await drive(Load(), ServerConfig(port=config.port, api_key="wrong"), {}, quiet)
    with pytest.raises(Unreachable, match="no server answers"):
        await drive(Load(), ServerConfig(port=config.port), {}, quiet)


@pytest.mark.parametrize(
    ("words_of_line", "said"),
    [
        (["--prompt-tokens", "0"], "--prompt-tokens"), (["--new-tokens", "9:3"], "--new-tokens"), (["--new-tokens", "x"], "--new-tokens"),
        (["--rate", "0"], "--rate"), (["--rate", "2", "--concurrency", "3"], "exclude"), (["--think", "-1"], "--think"),
        (["--turns", "0"], "--turns"), (["--goal", "ttft"], "--goal"), (["--goal", "itl:5"], "--goal"),
        (["--goal", "e2e:5,e2e:6"], "--goal"),
    ],
)  # fmt: skip
def test_bad_command_lines_are_one_line(words_of_line: list[str], said: str) -> None:
    """Wrong numbers, goals and combinations are refused by their flag before any server is asked."""
    with pytest.raises(BadSetting, match=said):
        run_line(["bench", COMMAND.name, "--port", "1", *words_of_line], {}, None)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_load_on_a_real_server(tmp_path: Path) -> None:
    """Over a server process with a tiny model: every token asked for is counted, and later turns find their history's rows."""
    model = random_model(tmp_path / "model")
    words_of_line = ["serve", str(model), "--device", "cpu", "--port", "0", "--log-format", "json", "--host-memory", "64MiB"]
    async with server_process(words_of_line) as address:
        config = ServerConfig(port=urlsplit(address).port or 0)
        load = Load(sessions=4, turns=2, prompt_tokens=Length(80, 100), new_tokens=Length(5, 9), concurrency=2)
        found = await drive(load, config, {"e2e": 60_000.0}, quiet)
    asked = sum(each.new_tokens for each in conversations(load))
    assert (found.failed, found.good) == (0, 8)
    assert as_json(found, {})["new_tokens"] == asked
    assert as_json(found, {})["cached_tokens"] > 4 * 64
