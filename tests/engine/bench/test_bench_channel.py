"""`forebay bench channel`: every arm is measured as often as it should be, and bad counts are refused."""

import json
import shutil
from pathlib import Path

import pytest

import server
from engine.bench.channel import BARE_STREAM, CHANNEL, IPERF, SMALL, STREAMS, ChannelTimes


@pytest.mark.slow
def test_every_arm_is_measured_and_nothing_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rounds of a few frames: two times an arm in the JSON, ratios of them in the table."""
    target = tmp_path / "out.json"
    assert server.main(["bench", "channel", "--rounds", "2", "--frames", "4", "--turns", "5", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    arms = {CHANNEL, SMALL, BARE_STREAM} | ({IPERF} if shutil.which("iperf3") else set())
    assert {name: len(rates) for name, rates in found["bytes_per_second"].items()} == dict.fromkeys(arms, 2)
    assert {name: len(times) for name, times in found["hop_us"].items()} == dict.fromkeys((CHANNEL, BARE_STREAM, STREAMS), 2)
    assert all(value > 0 for value in found["ratios"].values())
    assert "hop: channel / bare protocol" in capsys.readouterr().out


def test_counts_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """No round, no frame or no turn is one line and exit code 2."""
    for flag in ("--rounds", "--frames", "--turns"):
        assert server.main(["bench", "channel", flag, "0"]) == 2
        assert "must be at least 1" in capsys.readouterr().err


def test_a_ratio_is_of_two_arms_of_one_round() -> None:
    """The median of the rounds' ratios, not a ratio of medians."""
    times = ChannelTimes(1, 1, throughput={"a": [1.0, 10.0, 30.0], "b": [2.0, 5.0, 10.0]})
    assert times.ratio("a", "b", "throughput") == 2.0
