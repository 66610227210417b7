"""The gate over HTTP: scripted engines behind the real server, then real processes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.chunk import Chunk, Usage
from engine.commands import gate as command
from engine.commands.line import run_line
from engine.config import EngineConfig, ServerConfig
from engine.doctor import Tree
from engine.errors import BadRequest, BadSetting, ForebayError, SessionBroken
from engine.gate import Plan, Runs, outcome
from engine.gate.machine import commit, driver
from engine.gate.process import ServerFailed, serve_words, server_process
from engine.gate.prompt import library_text, read_prompt_file, seeded_ids
from engine.gate.runs import _body
from engine.gate.verdict import Arm, Pair
from engine.protocol import SyntheticHistory
from engine.service import Service
from engine.settings import resolve
from server import listening, serve
from tests.fake_engine import FakeEngine, FakeTokenizer, Item

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [7, 8, 9]  # what the scripted engine says it was given


def script(tokens: list[int], last: asyncio.Event | None = None) -> list[Item]:
    """A completion of these ids, a chunk a token; `last` is waited for before the last one."""
    chunks: list[Item] = [Chunk(f"<{token}>", (token,), Usage(3, place + 1)) for place, token in enumerate(tokens[:-1])]
    end = Chunk(f"<{tokens[-1]}>", (tokens[-1],), Usage(3, len(tokens)), finish_reason="length")
    return [*chunks, end] if last is None else [*chunks, last, end]


Script = Callable[[Arm, asyncio.Event], list[Item]]


def always(*tokens: int) -> Script:
    """The same tokens in both arms."""
    return lambda arm, last: script(list(tokens), last)


class Servers:
    """Starts the real server in front of a scripted engine, one a run, and remembers them.

    The last token of a measured answer comes after the gate has seen an earlier one, so that no answer comes in one piece.
    """

    def __init__(self, script_of: Script, tokenizer: FakeTokenizer | None = None) -> None:
        self.script_of, self.tokenizer = script_of, tokenizer or FakeTokenizer()
        self.arms: list[Arm] = []
        self.engines: list[FakeEngine] = []
        self.lasts: list[asyncio.Event] = []  # of the servers in the order they were started, and so asked
        self.asked, self._seen = 0, ("", 0)
        self.warm_up = script([5])

    def watch(self, title: str, done: int, total: int) -> None:
        if title != self._seen[0] or done < self._seen[1]:
            self.asked += 1
        self._seen = title, done
        if done:
            self.lasts[self.asked - 1].set()

    @asynccontextmanager
    async def __call__(self, arm: Arm) -> AsyncIterator[str]:
        self.arms.append(arm)
        self.lasts.append(asyncio.Event())
        scripts = [self.warm_up, self.script_of(arm, self.lasts[-1])]
        self.engines.append(FakeEngine(scripts, tokenizer=self.tokenizer))  # type: ignore[arg-type]  # a list of lists of items
        service = Service(ServerConfig(port=0, synthetic_history=True))
        service.engine = self.engines[-1]
        async with listening(service) as address:
            yield address


def plan(tmp_path: Path, **fields: object) -> Plan:
    """Three new tokens behind the scripted prompt, after a warm-up of one."""
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(PROMPT))
    settings: dict[str, object] = {"prompt_file": path, "new_tokens": 3, "warmup_tokens": 1, "limit": 0.99, "null_pairs": 1, **fields}
    return Plan(engine=EngineConfig(), model="m", **settings)  # type: ignore[arg-type]


async def pairs_of(plan: Plan, servers: Servers) -> list[Pair]:
    return await Runs(plan, servers, servers.watch).all()


async def test_every_run_has_a_server_of_its_own(tmp_path: Path) -> None:
    """Two pairs and a null pair are six servers, A B, A A, B A; each gets a warm-up, then the same request, and all agree."""
    servers, given = Servers(always(1, 2, 3)), plan(tmp_path, pairs=2)
    found = await pairs_of(given, servers)
    assert servers.arms == ["resident", "offload", "resident", "resident", "offload", "resident"]
    assert [len(engine.calls) for engine in servers.engines] == [2] * 6
    assert {tuple(call.prompt) for engine in servers.engines for call in engine.calls} == {(7, 8, 9)}  # type: ignore[arg-type]
    sampling = servers.engines[0].calls[1].sampling
    assert (sampling.temperature, sampling.ignore_eos, sampling.max_tokens) == (0.0, True, 3)
    assert [pair.equal for pair in found] == [True] * 3
    assert {run.completion_tokens for pair in found for run in pair.runs} == {3}
    assert {run.misses for pair in found for run in pair.runs} == {0}  # the scripted counts stand still: only what was added is a run's


async def test_servers_of_a_pair_can_start_together(tmp_path: Path) -> None:
    """A pair's two servers are both up before either is asked, and gone before the next pair's start; the runs are those of any order."""
    up: list[str] = []

    class Counted(Servers):
        @asynccontextmanager
        async def __call__(self, arm: Arm) -> AsyncIterator[str]:
            up.append("+")
            async with super().__call__(arm) as address:
                yield address
            up.append("-")

        def watch(self, title: str, done: int, total: int) -> None:
            assert up.count("+") - up.count("-") == 2
            super().watch(title, done, total)

    apart = await pairs_of(plan(tmp_path, pairs=2), Servers(always(1, 2, 3)))
    servers = Counted(always(1, 2, 3))
    found = await pairs_of(plan(tmp_path, pairs=2, together=True), servers)
    assert "".join(up) == "++--" * 3
    assert servers.arms == ["resident", "offload", "resident", "resident", "offload", "resident"]
    assert [[run.sha256 for run in pair.runs] for pair in found] == [[run.sha256 for run in pair.runs] for pair in apart]


async def test_a_server_that_does_not_start_takes_its_partner_with_it(tmp_path: Path) -> None:
    """Started together, one that fails ends the gate with its own error, and none is left running."""
    up: list[Arm] = []

    @asynccontextmanager
    async def start(arm: Arm) -> AsyncIterator[str]:
        if arm == "offload":
            raise ServerFailed("the server did not come up: no room", 4)
        up.append(arm)
        try:
            yield "http://127.0.0.1:9"
        finally:
            up.remove(arm)

    with pytest.raises(ServerFailed, match="no room"):
        await Runs(plan(tmp_path, pairs=1, together=True), start, lambda title, done, total: None).all()
    assert up == []


async def test_a_planted_difference_fails_the_gate(tmp_path: Path) -> None:
    """One other token in the offloaded arm fails the pair and the gate, however fast it was."""
    servers = Servers(lambda arm, last: script([1, 2, 4] if arm == "offload" else [1, 2, 3], last))
    found = outcome(plan(tmp_path, pairs=1), await pairs_of(plan(tmp_path, pairs=1), servers))
    assert not found.passes
    assert not found.outputs_equal
    assert found.verdicts[0].reason == "the outputs differ"
    assert found.nulls[0].equal


async def test_a_broken_run_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    """An error in the middle of a stream fails its pair with the server's words; the null pair is measured all the same."""

    def broken(arm: Arm, last: asyncio.Event) -> list[Item]:
        whole = script([1, 2, 3], last)
        return [*whole[:-1], SessionBroken("a copy failed")] if arm == "offload" else whole

    given = plan(tmp_path, pairs=1)
    found = outcome(given, await pairs_of(given, Servers(broken)))
    assert not found.passes
    assert "a copy failed" in found.verdicts[0].reason
    assert found.nulls[0].equal


async def test_a_wrong_length_is_no_measurement(tmp_path: Path) -> None:
    """A server that gives fewer tokens than asked fails the run."""
    found = await pairs_of(plan(tmp_path, pairs=1, new_tokens=4), Servers(always(1, 2, 3)))
    assert "4 tokens were asked for" in found[0].failed


async def test_another_prompt_is_no_measurement(tmp_path: Path) -> None:
    """A server that answers another prompt than the one it was sent fails the run."""
    given = plan(tmp_path, pairs=1)
    (tmp_path / "prompt.json").write_text("[7, 8, 10]")
    assert "another prompt" in (await pairs_of(given, Servers(always(1, 2, 3))))[0].failed


async def test_the_history_goes_to_the_measured_request_only(tmp_path: Path) -> None:
    """--history reaches the engine with the measured request, not with the warm-up."""
    servers = Servers(always(1, 2, 3))
    await pairs_of(plan(tmp_path, pairs=1, null_pairs=0, history=SyntheticHistory(5, 100)), servers)
    assert [call.history for call in servers.engines[0].calls] == [None, SyntheticHistory(5, 100)]


async def test_the_warm_up_has_the_room_of_the_measured_request(tmp_path: Path) -> None:
    """The short answer's session may grow as long as the measured one, history included, and is left once its tokens have come."""

    servers = Servers(lambda arm, last: script([1, 2, 3], last))
    servers.warm_up = script(list(range(1, 40)), asyncio.Event())  # its last token never comes
    found = await pairs_of(plan(tmp_path, pairs=1, null_pairs=0, warmup_tokens=2, history=SyntheticHistory(5, 100)), servers)
    assert found[0].equal
    engine = servers.engines[0]
    assert [call.sampling.max_tokens for call in engine.calls] == [100 + 3 + 3 - 3, 3]
    assert engine.aborted == 1


async def test_an_impossible_request_ends_the_gate(tmp_path: Path) -> None:
    """What the server refuses for good is a bad setting, raised at the first run."""
    servers = Servers(always(1, 2, 3), FakeTokenizer(available=False))
    (tmp_path / "text").write_text("some words")
    with pytest.raises(BadSetting, match="no tokenizer"):
        await pairs_of(plan(tmp_path, prompt_file=tmp_path / "text"), servers)
    assert servers.arms == ["resident"]


async def test_a_refusal_is_said_in_the_servers_words(tmp_path: Path) -> None:
    """A request that can never be served ends the gate with the server's own message and exit code 2."""

    def refuses(arm: Arm, last: asyncio.Event) -> list[Item]:
        return [BadRequest("3 prompt tokens and 3 new ones exceed the context of 5 tokens", field="prompt")]

    with pytest.raises(BadSetting, match=r"settings: 3 prompt tokens and 3 new ones exceed the context of 5 tokens$"):
        await pairs_of(plan(tmp_path), Servers(refuses))


@pytest.mark.parametrize("available", [True, False])
async def test_prompts_without_a_file(tmp_path: Path, available: bool) -> None:
    """Without a file the prompt is library source cut to exactly the asked tokens, or seeded ids where there is no tokenizer."""
    servers = Servers(always(1, 2, 3), FakeTokenizer(available=available))
    runs = Runs(plan(tmp_path, prompt_file=None, prompt_tokens=500, pairs=1, null_pairs=0), servers, servers.watch)
    await runs.all()
    assert runs.prompt is not None
    assert runs.prompt.ids == (tuple(library_text(1_500).encode()[:500]) if available else seeded_ids(500))
    assert {len(call.prompt) for engine in servers.engines for call in engine.calls} == {64, 500}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("[1, 2]", [1, 2]),
        ("[]", "[]"),
        ("[1, -2]", "[1, -2]"),
        ("[true]", "[true]"),
        ("[1.0]", "[1.0]"),
        ("{}", "{}"),
        ("7", "7"),
        ("hi", "hi"),
    ],
)
def test_prompt_files(tmp_path: Path, content: str, found: object) -> None:
    """A JSON list of ids is ids; everything else is a text."""
    path = tmp_path / "p"
    path.write_text(content)
    assert read_prompt_file(path) == found


@pytest.mark.parametrize("content", [None, b"", b"\xff"])
def test_unreadable_prompt_files(tmp_path: Path, content: bytes | None) -> None:
    """A missing, empty or non-UTF-8 file is a bad setting that names it."""
    if content is not None:
        (tmp_path / "p").write_bytes(content)
    with pytest.raises(BadSetting, match="--prompt-file"):
        read_prompt_file(tmp_path / "p")


@pytest.mark.parametrize("depth", [None, 0, 3])
def test_a_servers_words_say_how_deep_to_draft(depth: int | None) -> None:
    """A depth, and the absence of one, reach the server as what they are."""
    words = serve_words(Plan(engine=EngineConfig(draft_depth=depth), model="m"), "offload")
    text = words[words.index("--draft-depth") + 1]
    assert resolve({"model": "m", "draft_depth": text}, {}).engine.draft_depth == depth


@pytest.mark.parametrize("arm", ["resident", "offload"])
def test_a_servers_words_say_every_setting(arm: Arm) -> None:
    """The command line of an arm resolves to the gate's own engine settings with its placement, and nothing stored between runs."""
    config = EngineConfig(hot_rows=77, host_memory_bytes=3 << 20, device="cpu", row_format="f32", latent_norm_eps=1e-5, context_max=900)
    words = serve_words(Plan(engine=config, model="some/model", history=SyntheticHistory(1, 2)), arm)
    assert words[:2] == ["serve", "some/model"]
    flags = {name[2:].replace("-", "_"): value for name, value in zip(words[2:-1:2], words[3:-1:2], strict=True)}
    settings = resolve({"model": words[1], "synthetic_history": "true", **flags}, {})
    assert settings.engine == EngineConfig(
        hot_rows=77, host_memory_bytes=3 << 20, device="cpu", row_format="f32", latent_norm_eps=1e-5, context_max=900, placement=arm,
        prefix_cache="off",
    )  # fmt: skip
    assert settings.server.port == 0
    assert words[-1] == "--synthetic-history"


def line(*words: str) -> int:
    return run_line(words, {}, serve)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no model"),
        (("m", "--pairs", "x"), "--pairs must be an integer"),
        (("m", "--pairs", "0"), "--pairs must be at least 1"),
        (("m", "--draft-depth", "8"), "draft_depth must be auto or between 0 and 7"),
        (("m", "--draft-depth", "0,9"), "draft_depth must be auto or between 0 and 7"),
        (("m", "--draft-depth", "0,x"), "--draft-depth must be auto or an integer, or several separated by commas, not '0,x'"),
        (("m", "--draft-depth", "3,0,3"), "names a depth twice"),
        (("m", "--limit", "x"), "--limit"),
        (("m", "--limit", "-1"), "--limit"),
        (("m", "--history", "real:1:2"), "--history must be synthetic:SEED:ROWS"),
        (("m", "--prompt-file", "x", "--prompt-tokens", "5"), "exclude each other"),
        (("m", "--placement", "resident"), "--placement means nothing"),
        (("m", "--json", "/nowhere/at/all.json"), "cannot write"),
        (("m", "--json", "/"), "cannot write"),
    ],
)
def test_bad_lines(words: tuple[str, ...], says: str) -> None:
    """What is wrong with the gate's command line is one line with exit code 2, before any server is started."""
    with pytest.raises(ForebayError, match=says) as caught:
        line("gate", *words)
    assert caught.value.exit_code == 2


def test_the_commit_and_the_driver(tmp_path: Path) -> None:
    """Outside a clone there is no commit but the one a copy names; the driver's version is the first line of its maker's file."""
    assert commit(tmp_path) is None
    assert driver(Tree(tmp_path)) is None
    (tmp_path / ".commit").write_text("somewhere\n")
    assert commit(tmp_path) is None
    (tmp_path / ".commit").write_text("0123456789abcdef" * 2 + "89abcdef\n")
    assert commit(tmp_path) == {"commit": "0123456789abcdef" * 2 + "89abcdef", "changed_files": None}
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.10.5\n")
    assert driver(Tree(tmp_path)) == "6.10.5"


async def test_a_server_that_does_not_come_up_says_why() -> None:
    """The line and the exit code of a server that refuses its settings are the gate's own."""
    with pytest.raises(ServerFailed, match="--prot means nothing") as caught:
        async with server_process(["serve", "--prot", "0"]):
            pass
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_the_gate_passes_over_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One pair with the packaged model, 200 prompt tokens and 8 new: equal outputs, a speed each, all of it in the JSON, exit code 0."""
    target = tmp_path / "gate.json"
    given = ["--demo", "--device", "cpu", "--hot-rows", "256", "--host-memory", "64MiB", "--context-max", "2048", "--log-format", "json"]
    given += ["--prompt-tokens", "200", "--new-tokens", "8", "--warmup-tokens", "0", "--pairs", "1", "--limit", "99", "--json", str(target)]
    assert line("gate", *given, "--history", "synthetic:3:300") == 0
    written = json.loads(target.read_text())
    resident, offload = written["pairs"][0]["runs"]
    assert written["passes"]
    assert resident["sha256"] == offload["sha256"]
    assert (resident["prompt_tokens"], resident["completion_tokens"], written["prompt"]["tokens"]) == (500, 8, 200)
    assert offload["hits"] + offload["misses"] > 0
    assert resident["hits"] + resident["misses"] == 0
    assert written["machine"]["versions"]["torch"]
    assert [finding["name"] for finding in written["machine"]["host_settings"]][:2] == ["NUMA balancing", "proactive compaction"]
    assert "all outputs equal" in capsys.readouterr().out


def test_the_command_is_listed() -> None:
    """The gate's defaults are the measurement's: 50,023 in, 1,024 out, three pairs."""
    defaults = Plan(engine=EngineConfig(), model="m")
    assert (defaults.prompt_tokens, defaults.new_tokens, defaults.pairs, defaults.null_pairs, defaults.limit) == (
        50_023,
        1_024,
        3,
        2,
        0.0015,
    )
    assert command.COMMAND.name == "gate"


def test_every_request_has_the_same_seed() -> None:
    """Forced acceptance decides by seed and position: a request without one would draw its own, and two placements would differ."""
    plan: Any = SimpleNamespace(history=None)
    bodies = [_body((1, 2), 5, plan, warm=warm) for warm in (False, True)]
    assert isinstance(bodies[0]["seed"], int)
    assert bodies[0]["seed"] == bodies[1]["seed"]
