"""`forebay demo` over a real socket at toy size, and its bad inputs."""

import pytest

import server
from engine.errors import BadSetting


def run(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("CI", "1")
    return server.main(["demo", *words])


def test_the_demo_compares_both_placements(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It exits 0, says the tokens were the same, and read at least the prompt that was asked for."""
    assert run("--prompt-tokens", "700", "--max-tokens", "6", "--hot-rows", "256", monkeypatch=monkeypatch) == 0
    table = capsys.readouterr().err
    assert "yes" in table
    counted = next(line for line in table.splitlines() if "prompt tokens" in line)
    assert int(counted.split("│")[2].strip().replace(",", "")) >= 700


def test_the_demo_fails_when_the_tokens_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A resident run that gives another token makes the exit status 1."""
    from engine.commands import demo

    real = demo._run_resident

    async def other(*arguments: object) -> object:
        resident = await real(*arguments)  # type: ignore[arg-type]  # passed through
        return demo._Resident([resident.tokens[0] + 1, *resident.tokens[1:]], resident.device_bytes, resident.tokens_per_second)

    monkeypatch.setattr(demo, "_run_resident", other)
    assert run("--prompt-tokens", "300", "--max-tokens", "3", monkeypatch=monkeypatch) == 1
    assert "NO" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--prompt-tokens", "abc"), ("--prompt-tokens", "0"), ("--max-tokens", "-5"), ("--max-tokens", "x")]
)
def test_bad_numbers_are_one_line(flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A count that is none, or below 1, is one line naming the flag and exit code 2, before anything is loaded."""
    assert run(flag, value, monkeypatch=monkeypatch) == BadSetting.exit_code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert flag in lines[0]


def test_the_demo_uses_the_servers_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With an API key set its own client carries it; a placement set elsewhere does not change what is shown."""
    monkeypatch.setenv("FOREBAY_API_KEY", "a-key")
    monkeypatch.setenv("FOREBAY_PLACEMENT", "resident")
    assert run("--prompt-tokens", "300", "--max-tokens", "3", monkeypatch=monkeypatch) == 0
    assert "yes" in capsys.readouterr().err
