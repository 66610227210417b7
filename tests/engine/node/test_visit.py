"""The doctor at several nodes: all side by side, the network between them, who is not there, and what is said about it."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from engine.commands.doctor_nodes import print_findings
from engine.node.address import Address
from engine.node.comparison import as_json, lines, pair_lines
from engine.node.report import NodeReport, Pair, Setting, report_of_here
from engine.node.visit import Effort, Findings, visit
from engine.node.waiting_room import wait_for_doctor
from streams import ChannelLimits
from tests.streams.channel_world import KEY

EFFORT = Effort(ChannelLimits(silence_ms_max=1000, beat_ms=100), frames=20, turns=5)


@asynccontextmanager
async def waiting(count: int, key: bytes = KEY) -> AsyncIterator[list[Address]]:
    """So many nodes without a stage, on loopback."""
    ports: asyncio.Queue[int] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(wait_for_doctor(Address("127.0.0.1", 0), key, EFFORT.limits, ports.put_nowait)) for _ in range(count)
        ]  # fmt: skip
        yield [Address("127.0.0.1", await ports.get()) for _ in range(count)]
        for task in tasks:
            task.cancel()


async def test_nodes_are_asked_and_measure_one_another() -> None:
    """Every node has a report, every ordered pair its numbers; one clock has no offset to itself."""
    told: list[tuple[int, int]] = []
    async with waiting(2) as nodes:
        found = await visit(nodes, KEY, EFFORT, lambda done, total: told.append((done, total)))
    assert set(found.reports) == set(nodes)
    assert not found.lost
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(found.pairs) == {(nodes[0], nodes[1]), (nodes[1], nodes[0])}
    for pair in found.pairs.values():
        assert not pair.failure
        assert pair.round_trip_ms is not None
        assert 0 < pair.round_trip_ms < 1000
        assert pair.bytes_per_second is not None
        assert pair.bytes_per_second > 1e6
        assert pair.offset_ms is not None
        assert abs(pair.offset_ms) <= pair.round_trip_ms  # one machine's clock
        assert pair.mtu is not None
        assert pair.mtu >= 1280
    assert {line.state for line in lines(found) if line.name in ("answers", "host", "torch", "python", "clock, against here")} == {"same"}


async def test_who_does_not_answer_is_a_line() -> None:
    """A port where nobody listens, and a node with another key: each is named with its reason, and the others are measured all the same."""
    async with waiting(2) as nodes, waiting(1, b"another key of sixteen") as strangers:
        nobody = Address("127.0.0.1", 1)
        found = await visit([nodes[0], nobody, strangers[0], nodes[1]], KEY, EFFORT, lambda done, total: None)
    assert set(found.reports) == set(nodes)
    assert "cannot be reached" in found.lost[nobody]
    assert "unauthenticated" in found.lost[strangers[0]]
    assert not found.pairs[nodes[0], nodes[1]].failure
    assert "cannot be reached" in found.pairs[nodes[0], nobody].failure
    assert found.pairs[nobody, nodes[0]].failure == found.lost[nobody]
    assert lines(found)[0].state == "bad"


def made_up(*reports: NodeReport, offsets: tuple[float, ...] = (0.0, 0.0), pairs: tuple[Pair, Pair] = (Pair(), Pair())) -> Findings:
    nodes = (Address("one", 1), Address("two", 2))
    return Findings(
        nodes, dict(zip(nodes, reports, strict=True)), {}, dict(zip(nodes, offsets, strict=True)),
        {(nodes[0], nodes[1]): pairs[0], (nodes[1], nodes[0]): pairs[1]},
    )  # fmt: skip


def report(host: str, *settings: Setting, **versions: str) -> NodeReport:
    return NodeReport(host, 1, {"torch": "2.13.0", **versions}, list(settings), {"eth0": 1500})


def states(found: Findings) -> dict[str, str]:
    return {line.name: line.state for line in lines(found)}


def test_a_setting_that_is_bad_on_one_node_is_bad_for_all() -> None:
    """One node with NUMA balancing on: its line says so, with both values and what to do."""
    found = made_up(report("a", Setting("NUMA balancing", "0", "good")), report("b", Setting("NUMA balancing", "1", "bad")))
    [line] = [each for each in lines(found) if each.name == "NUMA balancing"]
    assert (line.state, line.values) == ("bad", ("0", "1"))
    assert "forebay doctor" in line.advice


def test_versions_and_settings_that_differ_are_named_and_hosts_may_differ() -> None:
    """What must be alike is marked; names, and sizes that no two machines share, are not."""
    one = report("a", Setting("huge pages", "always", "good"), Setting("free RAM", "12 GiB of 24", "good"))
    two = report("b", Setting("huge pages", "madvise", "good"), Setting("free RAM", "11 GiB of 24", "good"), torch="2.12.1")
    found = states(made_up(one, two))
    assert (found["torch"], found["huge pages"], found["free RAM"], found["host"]) == ("differs", "differs", "same", "same")


def test_clocks_that_are_apart_are_bad() -> None:
    """Against the one who asks; what counts is between the nodes."""
    two = (report("a"), report("b"))
    assert states(made_up(*two, offsets=(5000.0, 5010.0)))["clock, against here"] == "same"
    assert states(made_up(*two, offsets=(-30.0, 30.0)))["clock, against here"] == "bad"


def test_a_network_that_is_not_the_same_both_ways_is_said() -> None:
    """Another MTU on the way back, and less than half of its bandwidth."""
    there, back = Pair(1.0, 1e8, 0.0, 9000), Pair(1.0, 1e9, 0.0, 1500)
    said = [each[3] for each in pair_lines(made_up(report("a"), report("b"), pairs=(there, back)))]
    assert said[0] == "the way back takes packets of 1500 bytes: give both cards one MTU; less than half of the way back"
    assert said[1] == "the way back takes packets of 9000 bytes: give both cards one MTU"


def test_tables_and_json_say_the_same() -> None:
    """Every line and pair is in both; what is bad stands last."""
    found = made_up(
        report("a", Setting("NUMA balancing", "0", "good")), report("b", Setting("NUMA balancing", "1", "bad"), torch="2"),
        pairs=(Pair(0.25, 1.5e9, 0.5, 1500), Pair(failure="silent: nothing was heard")),
    )  # fmt: skip
    text = io.StringIO()
    print_findings(found, Console(file=text, width=200), as_json_text=False)
    for part in ("one:1", "two:2", "NUMA balancing", "0.250", "1500", "silent: nothing was heard", "bad: NUMA balancing", "differs: torch"):
        assert part in text.getvalue()
    text = io.StringIO()
    print_findings(found, Console(file=text), as_json_text=True)
    told = json.loads(text.getvalue())
    assert told == json.loads(json.dumps(as_json(found)))
    assert [line["state"] for line in told["lines"] if line["name"] == "NUMA balancing"] == ["bad"]
    assert told["pairs"][1]["failure"] == "silent: nothing was heard"


def test_a_report_of_this_machine_names_its_versions_and_settings() -> None:
    """What the doctor of one host says is in it, and what must be alike on all nodes."""
    found = report_of_here("a fingerprint")
    assert found.model == "a fingerprint"
    assert {"python", "torch", "forebay", "channel protocol", "kernel"} <= set(found.versions)
    assert {"NUMA balancing", "free RAM"} <= {setting.name for setting in found.settings}


@pytest.mark.parametrize("pair", [Pair(), Pair(0.1, 1e9, 0.0, 1500), Pair(failure="no")])
def test_no_pair_is_an_error(pair: Pair) -> None:
    """Whatever was measured of it."""
    assert len(pair_lines(made_up(report("a"), report("b"), pairs=(pair, Pair())))) == 2
