"""Curves as an SVG: lines with markers over one axis, a marker hollow where the point is not sound, a legend below.

Knows no simulation but `Picture`.
"""

import math
from xml.sax.saxutils import escape

from engine.simulation.sweeps import ROWS_HELD, Curve, Picture

__all__ = ["chart"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 20, 40, 54
_LEGEND, _LEGEND_COLUMNS = 20, 2
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2")


def chart(picture: Picture) -> bytes:
    """The picture as an SVG, UTF-8. A curve without points is an error of the caller's."""
    assert all(curve.points for curve in picture.curves), f"{picture.name} has an empty curve"
    assert len(picture.curves) <= len(_COLOURS), f"{picture.name} has more curves than there are colours"
    frame = _Frame(picture)
    rows = -(-len(picture.curves) // _LEGEND_COLUMNS)
    hollow = not all(point.sound for curve in picture.curves for point in curve.points)
    height = _HEIGHT + _LEGEND * (rows + hollow) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(picture.title)}</text>',
        *frame.axes(),
    ]
    for place, curve in enumerate(picture.curves):
        lines += [*frame.drawn(curve, _COLOURS[place]), *_entry(place, _COLOURS[place], curve.name, hollow=False)]
    if hollow:
        said = f"hollow: passes may have more than {ROWS_HELD} rows, where the simulation does not hold"
        lines += _entry(rows * _LEGEND_COLUMNS, "#555555", said, hollow=True)
    return "\n".join([*lines, "</svg>\n"]).encode()


class _Frame:
    """Where values lie in the picture."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._low, self._high = (self._scaled(value) for value in (picture.ticks[0][0], picture.ticks[-1][0]))
        most = max(point.tokens_per_second for curve in picture.curves for point in curve.points)
        self._step: float = next(unit * 10.0**power for power in range(-3, 9) for unit in (1, 2, 5) if unit * 10.0**power * 8 >= most)
        self._most = self._step * math.ceil(most / self._step)

    def _scaled(self, x: float) -> float:
        return math.log2(x) if self._picture.logarithmic else x

    def _x(self, x: float) -> float:
        share = (self._scaled(x) - self._low) / (self._high - self._low)
        return _LEFT + 10 + (_WIDTH - _LEFT - _RIGHT - 20) * share

    def _y(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * y / self._most

    def axes(self) -> list[str]:
        """Grid, numbers and names of both axes."""
        lines = []
        for place in range(round(self._most / self._step) + 1):
            value = place * self._step
            y = self._y(value)
            lines.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value, name in self._picture.ticks:
            x = self._x(value)
            lines.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#eeeeee"/>')
            lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        lines.append(f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 32}" text-anchor="middle">{escape(self._picture.x_label)}</text>')
        return lines

    def drawn(self, curve: Curve, colour: str) -> list[str]:
        """A line and its markers, each with a title that a browser shows."""
        places = [(self._x(point.x), self._y(point.tokens_per_second), point) for point in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        lines = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
        for x, y, point in places:
            fill = colour if point.sound else "white"
            title = f"{curve.name}: {point.tokens_per_second:.1f} tokens/s, a step of {point.step_ms:.0f} ms"
            lines.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}"><title>{escape(title)}</title></circle>'
            )
        return lines


def _entry(place: int, colour: str, name: str, *, hollow: bool) -> list[str]:
    x = _LEFT + (_WIDTH - _LEFT - _RIGHT) // _LEGEND_COLUMNS * (place % _LEGEND_COLUMNS)
    y = _HEIGHT + _LEGEND * (place // _LEGEND_COLUMNS)
    fill = "white" if hollow else colour
    return [
        f'<circle cx="{x + 6}" cy="{y}" r="4.5" fill="{fill}" stroke="{colour}"/>',
        f'<text x="{x + 18}" y="{y + 4}">{escape(name)}</text>',
    ]
