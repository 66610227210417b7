"""`forebay bench channel`: every arm is measured as often as it should be, and bad counts are refused."""

import json
import os
import shutil
from pathlib import Path

import pytest

import server
from engine.bench.channel import BARE_STREAM, CHANNEL, IPERF, SMALL, STREAMS, TASK, ChannelTimes
from engine.bench.two_hosts import two_hosts
from engine.errors import BadSetting


def namespaces_allowed() -> bool:
    try:
        with two_hosts():
            return True
    except BadSetting:
        return False


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("where", [[], ["--namespaces"]])
def test_every_arm_is_measured_and_nothing_stays(where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rounds of a few frames: two times an arm in the JSON, ratios of them in the table; in namespaces too, of which none is left."""
    if where and not namespaces_allowed():
        pytest.skip("network namespaces are not allowed here")
    target = tmp_path / "out.json"
    assert server.main(["bench", "channel", *where, "--rounds", "2", "--frames", "4", "--turns", "5", "--json", str(target)]) == 0
    spaces = Path("/run/netns")
    assert not spaces.exists() or not [one for one in spaces.iterdir() if one.name.startswith(f"fbb{os.getpid()}")]
    found = json.loads(target.read_text())
    arms = {CHANNEL, SMALL, BARE_STREAM} | ({IPERF} if shutil.which("iperf3") else set())
    assert {name: len(rates) for name, rates in found["bytes_per_second"].items()} == dict.fromkeys(arms, 2)
    assert {name: len(times) for name, times in found["hop_us"].items()} == dict.fromkeys((CHANNEL, BARE_STREAM, TASK, STREAMS), 2)
    assert all(value > 0 for value in found["ratios"].values())
    assert "hop: channel / bare protocol" in capsys.readouterr().out


def test_namespaces_without_root_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Who is not root gets one line that says what to do, and exit code 2."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert server.main(["bench", "channel", "--namespaces"]) == 2
    assert "needs root" in capsys.readouterr().err


def test_counts_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """No round, no frame or no turn is one line and exit code 2."""
    for flag in ("--rounds", "--frames", "--turns"):
        assert server.main(["bench", "channel", flag, "0"]) == 2
        assert "must be at least 1" in capsys.readouterr().err


def test_a_ratio_is_of_two_arms_of_one_round() -> None:
    """The median of the rounds' ratios, not a ratio of medians."""
    times = ChannelTimes(1, 1, throughput={"a": [1.0, 10.0, 30.0], "b": [2.0, 5.0, 10.0]})
    assert times.ratio("a", "b", "throughput") == 2.0
