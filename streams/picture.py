"""A tape as a picture: an SVG with a row a stream, time from left to right, and a row for the host: a stroke for each
submission, over grey where it waited for an event.

Operations are named where there is room and coloured by the last part of their label ("layer.3.attend" as every "attend"), in the order in
which these appear. Those that are too narrow to be seen are drawn two pixels wide. Knows no operation by name.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from streams.tape import Awaited, Completed, Resumed, Submitted, Tape

__all__ = ["picture"]

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 1200, 130, 30, 36, 34, 24
_LEGEND, _LEGEND_COLUMNS = 18, 6
_LETTER = 6.0  # pixels of a letter on a bar
_HOST = "host"
_HOST_COLOUR = "#b0b0b0"
_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#2f4b7c", "#d37295", "#8cd17d",
)  # fmt: skip


def picture(tape: Tape, first_ns: int = 0, last_ns: int | None = None) -> bytes:
    """The tape from `first_ns` to `last_ns` (None: its end) as an SVG of 1,200 pixels' width, UTF-8."""
    last_ns = tape.length_ns if last_ns is None else last_ns
    assert first_ns < last_ns, f"a picture from {first_ns} to {last_ns} ns has no width"
    bars = [bar for bar in (*_work(tape), *_waits(tape)) if bar.ends_ns >= first_ns and bar.starts_ns <= last_ns]
    streams = dict.fromkeys(record.stream for record in tape.records if isinstance(record, Submitted))
    rows = {name: place for place, name in enumerate((*streams, _HOST))}
    kinds = list(dict.fromkeys(bar.kind for bar in bars if bar.kind))
    colours = {kind: _COLOURS[place % len(_COLOURS)] for place, kind in enumerate(kinds)}
    bottom = _TOP + _ROW * len(rows)
    height = bottom + 34 + _LEGEND * -(-len(kinds) // _LEGEND_COLUMNS)
    scale = _Scale(first_ns, last_ns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_axis(scale, bottom),
        *(f'<text x="{_LEFT - 8}" y="{_TOP + _ROW * place + 17}" text-anchor="end">{escape(name)}</text>' for name, place in rows.items()),
        *(bar.drawn(scale, rows[bar.row], colours.get(bar.kind, _HOST_COLOUR)) for bar in bars),
        *_strokes(tape, scale, _TOP + _ROW * rows[_HOST]),
        *_legend(colours, bottom + 30),
        "</svg>\n",
    ]
    return "\n".join(parts).encode()


class _Scale:
    """Time to pixels, within the picture."""

    def __init__(self, first_ns: int, last_ns: int) -> None:
        self.first_ns, self.last_ns = first_ns, last_ns

    def x(self, at_ns: int) -> float:
        inside = min(max(at_ns, self.first_ns), self.last_ns) - self.first_ns
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * inside / (self.last_ns - self.first_ns)


class _Bar:
    """Something with a begin and an end. `kind` "" is the host's waiting."""

    def __init__(self, row: str, label: str, kind: str, starts_ns: int, ends_ns: int, failed: bool = False) -> None:
        self.row, self.label, self.kind, self.starts_ns, self.ends_ns, self.failed = row, label, kind, starts_ns, ends_ns, failed

    def drawn(self, scale: _Scale, place: int, colour: str) -> str:
        left, right = scale.x(self.starts_ns), scale.x(self.ends_ns)
        edge = ' stroke="red" stroke-width="2"' if self.failed else ""
        title = f"{self.label}, {(self.ends_ns - self.starts_ns) / 1000:.1f} µs"
        return (
            f'<rect x="{left:.1f}" y="{_TOP + _ROW * place}" width="{max(right - left, 2):.1f}" height="{_BAR}" fill="{colour}"{edge}>'
            f"<title>{escape(title)}</title></rect>{self._named(left, right, place)}"
        )

    def _named(self, left: float, right: float, place: int) -> str:
        """The label on the bar, or what is left of it without its kind and first word, as far as there is room."""
        short = self.label.removesuffix(f".{self.kind}").rpartition(".")[2]
        name = next((name for name in (self.label, short) if self.kind and _LETTER * len(name) + 4 <= right - left), "")
        middle, y = (left + right) / 2, _TOP + _ROW * place + 16
        return name and f'<text x="{middle:.1f}" y="{y}" text-anchor="middle" font-size="10" pointer-events="none">{escape(name)}</text>'


def _work(tape: Tape) -> Iterator[_Bar]:
    submitted: dict[int, Submitted] = {}
    for record in tape.records:
        if isinstance(record, Submitted):
            submitted[record.number] = record
        elif isinstance(record, Completed) and record.started_ns >= 0 and record.number in submitted:
            operation = submitted[record.number]
            kind = operation.label.rpartition(".")[2]
            yield _Bar(operation.stream, operation.label, kind, record.started_ns, record.at_ns, failed=bool(record.error))


def _waits(tape: Tape) -> Iterator[_Bar]:
    labels = {record.number: record.label for record in tape.records if isinstance(record, Submitted)}
    begun: dict[int, list[int]] = {}
    for record in tape.records:
        if isinstance(record, Awaited):
            begun.setdefault(record.number, []).append(record.at_ns)
        elif isinstance(record, Resumed) and begun.get(record.number):
            yield _Bar(_HOST, f"waits for {labels.get(record.number, record.number)}", "", begun[record.number].pop(0), record.at_ns)


def _strokes(tape: Tape, scale: _Scale, top: int) -> Iterator[str]:
    for record in tape.records:
        if isinstance(record, Submitted) and scale.first_ns <= record.at_ns <= scale.last_ns:
            x = scale.x(record.at_ns)
            yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + _BAR}" stroke="black" stroke-width="0.5"/>'


def _axis(scale: _Scale, bottom: int) -> Iterator[str]:
    """A line every 1, 2 or 5 times a power of ten ns, some ten in all."""
    length_ns = scale.last_ns - scale.first_ns
    step_ns = next(unit * 10**power for power in range(40) for unit in (1, 2, 5) if unit * 10**power * 12 >= length_ns)
    for at_ns in range(-(-scale.first_ns // step_ns) * step_ns, scale.last_ns + 1, step_ns):
        x = scale.x(at_ns)
        yield f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{at_ns / 1e6:g} ms</text>'


def _legend(colours: dict[str, str], top: int) -> Iterator[str]:
    for place, (kind, colour) in enumerate(colours.items()):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) // _LEGEND_COLUMNS * (place % _LEGEND_COLUMNS)
        y = top + _LEGEND * (place // _LEGEND_COLUMNS)
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="{y}">{escape(kind)}</text>'
