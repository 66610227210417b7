"""The nodes' answers side by side: which lines differ between them, which are bad on one, and what of the network is worth a look.

Pure: findings in, lines and JSON out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from engine.node.address import Address
from engine.node.report import NodeReport, Pair
from engine.node.visit import Findings

__all__ = ["Line", "State", "as_json", "lines", "pair_lines"]

State = Literal["same", "differs", "bad", "unknown"]
_OFFSET_MS_MAX = 20.0  # logs and tapes of two nodes are laid side by side by their clocks
_ABSENT = "no answer"
_OWN = ("free RAM", "locked memory")  # whose numbers differ between any two machines; only their state is compared


@dataclass(frozen=True, slots=True)
class Line:
    """One line: what it is about, a value a node, and what that comes to. `advice`: empty where nothing is to be done."""

    name: str
    values: tuple[str, ...]
    state: State
    advice: str = ""


def lines(found: Findings) -> list[Line]:
    """A line a fact, the machines first, what is the same everywhere too."""
    made = [Line("answers", tuple("yes" if node in found.reports else found.lost[node] for node in found.nodes), _answers(found))]
    names = dict.fromkeys(name for report in found.reports.values() for name in report.versions)
    made.append(_line(found, "host", lambda report: report.host, alike=False))
    made += [_line(found, name, lambda report, name=name: report.versions.get(name, "?")) for name in names]
    made.append(_line(found, "model", lambda report: report.model or "none open"))
    made.append(_offsets(found))
    settings = dict.fromkeys(setting.name for report in found.reports.values() for setting in report.settings)
    made += [_setting(found, name) for name in settings]
    return made


def _answers(found: Findings) -> State:
    return "bad" if found.lost else "same"


def _line(found: Findings, name: str, value: Any, *, alike: bool = True) -> Line:
    values = tuple(value(found.reports[node]) if node in found.reports else _ABSENT for node in found.nodes)
    different = alike and len({each for each in values if each != _ABSENT}) > 1
    return Line(name, values, "differs" if different else "same", f"make {name} the same on all nodes" if different else "")


def _offsets(found: Findings) -> Line:
    known = found.offset_ms_of
    values = tuple(f"{known[node]:+.1f} ms" if node in known else _ABSENT for node in found.nodes)
    apart = max(known.values()) - min(known.values()) if known else 0.0
    far = apart > _OFFSET_MS_MAX
    advice = f"clocks are {apart:.0f} ms apart: run chrony or ntpd on every node" if far else ""
    return Line("clock, against here", values, "bad" if far else "same", advice)


def _setting(found: Findings, name: str) -> Line:
    """A setting of the hosts: bad where it is bad on one, differing where the values do."""
    held = [_setting_of(found.reports.get(node), name) for node in found.nodes]
    values = tuple(_ABSENT if each is None else each[0] for each in held)
    states = {each[1] for each in held if each is not None}
    different = len({each[1 if name in _OWN else 0] for each in held if each is not None}) > 1
    state: State = "bad" if "bad" in states else "differs" if different else "unknown" if "unknown" in states else "same"
    advice = {"bad": "run forebay doctor on the node: it says how to set it", "differs": "nodes wait for one another: make it the same"}
    return Line(name, values, state, advice.get(state, ""))


def _setting_of(report: NodeReport | None, name: str) -> tuple[str, str] | None:
    if report is None:
        return None
    return next(((setting.now, setting.state) for setting in report.settings if setting.name == name), ("not there", "unknown"))


def pair_lines(found: Findings) -> list[tuple[Address, Address, Pair, str]]:
    """Every ordered pair of nodes, with what is worth saying about it."""
    return [(one, other, pair, _said(pair, found.pairs.get((other, one)))) for (one, other), pair in found.pairs.items()]


def _said(pair: Pair, back: Pair | None) -> str:
    if pair.failure:
        return pair.failure
    said = []
    if back is not None and pair.mtu is not None and back.mtu is not None and pair.mtu != back.mtu:
        said.append(f"the way back takes packets of {back.mtu} bytes: give both cards one MTU")
    if back is not None and pair.bytes_per_second and back.bytes_per_second and pair.bytes_per_second * 2 < back.bytes_per_second:
        said.append("less than half of the way back")
    return "; ".join(said)


def as_json(found: Findings) -> dict[str, Any]:
    """Everything, for programs."""
    compared: Iterable[Line] = lines(found)
    return {
        "version": 1,
        "nodes": [str(node) for node in found.nodes],
        "lines": [{"name": each.name, "values": each.values, "state": each.state, "advice": each.advice} for each in compared],
        "pairs": [
            {
                "from": str(one), "to": str(other), "round_trip_ms": pair.round_trip_ms, "bytes_per_second": pair.bytes_per_second,
                "offset_ms": pair.offset_ms, "mtu": pair.mtu, "failure": pair.failure, "advice": advice,
            }
            for one, other, pair, advice in pair_lines(found)
        ],
    }  # fmt: skip
