"""The command line: which commands there are, what each bad line says, and what `run` prints."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from rich.console import Console

import server
from engine import logs
from engine.commands import COMMANDS, WhileReady
from engine.commands.display import Bar, bytes_text
from engine.commands.line import run_line
from engine.config import ServerConfig
from engine.defaults import default_sampling
from engine.errors import BadModel, BadRequest, BadSetting, ForebayError, NotAdmitted
from engine.protocol import EngineFace
from engine.sampling import Sampling
from tests.fake_engine import FakeEngine, Opener, words

ROOT = Path(__file__).resolve().parent.parent


class Serving:
    """Stands for `server.serve`: opens the engine, runs what is to run while ready for one turn, and remembers."""

    def __init__(self) -> None:
        self.configs: list[ServerConfig] = []

    async def __call__(
        self,
        open_engine: Callable[[], AbstractAsyncContextManager[EngineFace]],
        config: ServerConfig,
        while_ready: WhileReady | None = None,
    ) -> None:
        self.configs.append(config)
        async with open_engine() as engine:
            assert while_ready is not None
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(while_ready("http://here", engine))  # type: ignore[arg-type]  # a coroutine function
                await asyncio.sleep(0)
                waiting.cancel()


def line(*words_: str, opener: Opener | None = None, serving: Serving | None = None, environment: dict[str, str] | None = None) -> int:
    opener = opener if opener is not None else Opener(FakeEngine([words("x")]))
    return run_line(words_, environment or {}, serving or Serving(), opener=opener)


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon a time\n")
    return str(path)


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`forebay --help` prints each command with its line and returns 0."""
    assert line("--help") == 0
    printed = capsys.readouterr().out
    assert all(command.name in printed and command.summary in printed for command in COMMANDS)
    assert "Settings" in printed
    assert "Every flag" not in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`forebay --version` says which version this is."""
    assert line("--version") == 0
    assert capsys.readouterr().out.startswith("forebay ")


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`forebay NAME --help` prints its flags and leaves with 0, without a model and without hidden flags."""
    with pytest.raises(SystemExit) as left:
        line(name, "--help")
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: forebay {name}" in printed
    assert "--config" in printed
    assert ("--cluster" in printed) == (name == "serve")


@pytest.mark.parametrize(
    ("given", "words_"),
    [
        ([], ["no command given", "there are: ", "serve", "run"]),
        (["bogus"], ["no command 'bogus'", "there are: ", "serve", "run"]),
        (["serv"], ["no command 'serv'", "did you mean serve?"]),
        (["serve", "--prot", "1"], ["--prot means nothing", "did you mean --port?"]),
        (["serve", "--prot=1"], ["--prot means nothing", "did you mean --port?"]),
        (["serve", "--hot", "1"], ["--hot means nothing"]),
        (["serve", "a", "b"], ["b means nothing to forebay serve"]),
        (["serve", "--port"], ["--port", "expected one argument"]),
        (["serve", "--port", "x"], ["--port must be an integer"]),
        (["node", "--demo"], ["no key: name the file", "--key-file"]),
        (["serve", "--demo", "--nodes=a:1", "--cluster=ray"], ["cluster and nodes exclude each other"]),
        (["serve", "--listen=a:1"], ["--listen means nothing to forebay serve"]),
        (["doctor", "cluster"], ["no nodes: name them with --nodes"]),
        (["doctor", "--nodes=a:1,b:2"], ["no key: name the file", "--key-file"]),
        (["doctor", "--nodes=a:1", "--key-file=/nowhere/key"], ["--key-file: the key file /nowhere/key cannot be read"]),
        (["serve", "--tape"], ["--tape", "expected one argument"]),
        (["serve", "--sessions-dir"], ["--sessions-dir", "expected one argument"]),
        (["run", "m", "--prompt-file", "x", "--sessions-dir", "d"], ["--sessions-dir means nothing to forebay run"]),
        (["serve"], ["no model", "--demo"]),
        (["serve", "m", "--demo"], ["MODEL and --demo exclude each other"]),
        (["serve", "m", "--draft-depth", "8"], ["draft_depth must be auto or between 0 and 7, not 8"]),
        (["run", "m"], ["--prompt-file"]),
        (["run", "m", "--prompt-file", "/nowhere/p"], ["cannot read /nowhere/p"]),
        (["run", "--prompt-file", "/nowhere/p"], ["no model"]),
        (["run", "m", "--prompt-file", "x", "--port", "1"], ["--port means nothing to forebay run"]),
        (["run", "m", "--prompt-file", "x", "--max-tokens", "many"], ["--max-tokens must be an integer"]),
        (["run", "m", "--prompt-file", "x", "--max-tokens", "0"], ["max_tokens must be an integer of at least 1"]),
        (["run", "m", "--prompt-file", "x", "--temperature", "hot"], ["--temperature must be a number"]),
    ],
)
def test_a_bad_line_is_one_line(given: list[str], words_: list[str]) -> None:
    """Whatever is wrong with a command line, the answer is one line that says what, with exit code 2; nothing is opened."""
    opener = Opener(FakeEngine([words("x")]))
    with pytest.raises(ForebayError) as caught:
        line(*given, opener=opener)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words_), message
    assert caught.value.exit_code == 2
    assert not opener.opened


@pytest.mark.parametrize(
    ("given", "says"), [((), "no stage: say which one"), (("--stage", "1"), "--stage 1: of 2 stages nodes have 0 to 0")]
)
def test_a_node_has_a_stage(tmp_path: Path, given: tuple[str, ...], says: str) -> None:
    """Without one, or with the head's, a node says which there are."""
    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    with pytest.raises(BadSetting, match=says):
        line("node", "--demo", "--listen", "127.0.0.1:7100", "--stages", "2", "--key-file", str(key), *given)


def test_a_bad_variable_is_refused_by_every_command() -> None:
    """An unknown FOREBAY_* variable stops a command before it does anything."""
    with pytest.raises(BadSetting, match="did you mean FOREBAY_HOT_ROWS"):
        line("serve", "--demo", environment={"FOREBAY_HOT_ROW": "1"})


def test_serve_hands_on_its_settings() -> None:
    """`forebay serve` opens the named model with the engine's settings and serves with the server's."""
    opener, serving = Opener(FakeEngine([words("x")])), Serving()
    given = ["serve", "some/model", "--hot-rows", "1024", "--port", "9", "--host-memory", "1GiB"]
    assert line(*given, opener=opener, serving=serving, environment={"FOREBAY_ROW_FORMAT": "f32"}) == 0
    directory, config = opener.opened[0]
    assert directory == Path("some/model")
    assert config is not None
    assert (config.hot_rows, config.row_format, config.host_memory_bytes) == (1024, "f32", 2**30)
    assert serving.configs == [ServerConfig(port=9)]


def test_run_prints_the_text_and_then_the_table(prompt_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`forebay run` writes nothing but the text to standard output, and counts and the memory table to standard error."""
    engine = FakeEngine([words("Hel", "lo", finish="length")])
    assert line("run", "m", "--prompt-file", prompt_file, "--max-tokens", "2", "--log-format", "json", opener=Opener(engine)) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello\n"
    assert "3 prompt tokens, 2 new (length)" in printed.err
    for text in ("20,000", "1,024", "17", "75.00% of 1,000 reads", "3.0 MiB", "512 B", "5.0 GiB"):
        assert text in printed.err
    assert engine.calls[0].prompt == "Once upon a time\n"
    assert engine.calls[0].sampling == Sampling(max_tokens=2, temperature=0.0)
    assert engine.calls[0].session == engine.made_sessions[0] == engine.closed_sessions[0]


def test_run_logs_progress_where_there_is_no_terminal(prompt_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal loading and reading the prompt show as JSON lines instead of a bar."""
    line("run", "m", "--prompt-file", prompt_file, "--log-format", "json", opener=Opener(FakeEngine([words("x")])))
    logged = [json.loads(text) for text in capsys.readouterr().err.splitlines() if text.startswith("{")]
    by_event = {entry["event"]: entry for entry in logged}
    assert by_event["model.loading"]["tensors_done"] == 1
    assert by_event["prompt.read"]["prompt_tokens"] == 3
    assert "timestamp" in by_event["prompt.read"]


def test_run_reads_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--prompt-file -` reads standard input."""
    engine = FakeEngine([words("x")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert line("run", "m", "--prompt-file", "-", opener=Opener(engine)) == 0
    assert engine.calls[0].prompt == "from a pipe"


@pytest.mark.parametrize(("content", "says"), [(b"", "is empty"), (b"ab\xff", "is not UTF-8: byte 2")])
def test_run_refuses_what_is_no_text(tmp_path: Path, content: bytes, says: str) -> None:
    """An empty prompt and bytes that are no text are refused by name."""
    path = tmp_path / "prompt"
    path.write_bytes(content)
    with pytest.raises(BadSetting, match=says):
        line("run", "m", "--prompt-file", str(path))


@pytest.mark.parametrize("error", [BadRequest("too long", field="prompt"), NotAdmitted("needs 5 GiB more RAM")])
def test_run_raises_the_engines_error_and_closes_the_session(error: ForebayError, prompt_file: str) -> None:
    """An error before the first chunk leaves as itself, not in a group, and the session is closed all the same."""
    engine = FakeEngine([[error]])
    opener = Opener(engine)
    with pytest.raises(type(error)) as caught:
        line("run", "m", "--prompt-file", prompt_file, opener=opener)
    assert caught.value is error
    assert engine.closed_sessions == engine.made_sessions
    assert opener.closed == 1


def test_main_turns_errors_into_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` prints `forebay: ` and the error's one line, and returns its code."""

    def fail(*_: object) -> int:
        raise BadModel("config.json: no field 'hidden_size'")

    monkeypatch.setattr(server, "run_line", fail)
    assert server.main(["serve", "x"]) == 3
    assert capsys.readouterr().err == "forebay: config.json: no field 'hidden_size'\n"

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "run_line", interrupt)
    assert server.main([]) == 130


def test_python_without_assertions_is_refused() -> None:
    """`python -O` prints one line and leaves with 2, whatever the command."""
    done = subprocess.run([sys.executable, "-O", "server.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "-O" in done.stderr


def test_a_bar_on_a_terminal_draws_and_leaves() -> None:
    """On a terminal a bar shows its counts, disappears when closed, and ignores what a late thread still reports."""
    screen = io.StringIO()
    with Bar("loading m", "model.loading", "tensors", Console(file=screen, force_terminal=True, width=100)) as bar:
        bar.update(0, 0)
        assert screen.getvalue() == ""
        bar.update(3, 338)
    drawn = screen.getvalue()
    assert "loading m" in drawn
    assert "3/338" in drawn
    bar.update(338, 338)
    bar.close()
    assert screen.getvalue() == drawn


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes_are_readable(size: int, text: str) -> None:
    """Sizes are exact below 1 KiB and in binary units above."""
    assert bytes_text(size) == text


def test_json_logs_are_one_object_a_line_and_hide_locals() -> None:
    """Every line is one JSON object, tracebacks included, and no local variable of a traceback is shown."""
    stream = io.StringIO()
    logs.configure("json", stream)
    log = logs.structlog.get_logger()

    def fail() -> None:
        hidden = "pass" + "phrase"
        raise ValueError(len(hidden))

    for log_format in ("json", "console"):
        logs.configure(log_format, stream)  # type: ignore[arg-type]  # both are of its literals
        try:
            fail()
        except ValueError:
            log.exception("thing.failed", size_bytes=3)
    first, _, rest = stream.getvalue().partition("\n")
    entry = json.loads(first)
    assert (entry["event"], entry["size_bytes"], entry["level"]) == ("thing.failed", 3, "error")
    assert "ValueError: 10" in entry["exception"]
    assert "ValueError: 10" in rest
    assert "passphrase" not in stream.getvalue()


@pytest.mark.parametrize(
    ("content", "sampling"),
    [
        (None, Sampling()),
        ("{}", Sampling()),
        ('{"temperature": 0.8, "top_p": 0.95, "top_k": 40, "do_sample": true}', Sampling(temperature=0.8, top_p=0.95, top_k=40)),
        ('{"temperature": 0.8, "do_sample": false}', Sampling(temperature=0.0)),
        ('{"temperature": null, "repetition_penalty": 1.1}', Sampling(repetition_penalty=1.1)),
    ],
)
def test_sampling_defaults_come_from_the_model(tmp_path: Path, content: str | None, sampling: Sampling) -> None:
    """generation_config.json gives the defaults, and without it those of Sampling stand."""
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert default_sampling(tmp_path) == sampling


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 2}', '{"top_k": true}'])
def test_bad_sampling_defaults_name_the_file(tmp_path: Path, content: str) -> None:
    """A broken generation_config.json is a bad model, in one line that names the file."""
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(BadModel, match=r"generation_config\.json") as caught:
        default_sampling(tmp_path)
    assert "\n" not in str(caught.value)
