"""Curves as a small inline SVG with colours from the page's CSS, in light and dark mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from html import escape

from quasiglobal.reproduction.report.document import Line, Plot
from quasiglobal.runs.plots import COLOURS, CYCLE

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 10, 34
SHADES = tuple(dict.fromkeys([*CYCLE, *COLOURS.values()]))
"""Line colours; each has a CSS class (`shade-0`, `shade-1`, …), so that dark mode can change it."""


def figure(plot: Plot) -> str:
    """Render a plot as an HTML figure with a legend and a text alternative for screen readers."""
    shades = _shades(plot.lines)
    places = sorted({x for line in plot.lines for x, *_ in (*line.points, *line.published)})
    spread = SPREAD if plot.beside_paper else 0
    inset = spread * len(plot.lines)
    across = _scale(places, LEFT + inset, WIDTH - RIGHT - inset, plot.logarithmic)
    heights = [y for line in plot.lines for _, y in line.points]
    heights += [y for line in plot.lines for pair in line.band for y in pair]
    heights += [y for line in plot.lines for _, mean, std in line.published for y in (mean - std, mean + std)]
    up = _scale(heights, HEIGHT - BOTTOM, TOP, False)
    marks = places if plot.logarithmic else _round_numbers(min(places), max(places))
    shifts = [spread * (2 * k - len(plot.lines) + 0.5) for k in range(len(plot.lines))]
    levels = _round_numbers(min(heights), max(heights))
    parts = [
        *(f'<path class="axis" d="M{LEFT} {up(y):.1f}H{WIDTH - RIGHT}"/>' for y in levels),
        *(f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>' for y in levels),
        *(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:g}</text>' for x in marks),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(plot.x)}</text>',
        *(
            _published(line, shade, _moved(across, shift), up)
            + _curve(line, shade, _moved(across, shift + spread), up)
            for line, shade, shift in zip(plot.lines, shades, shifts, strict=True)
        ),
    ]
    keys = "".join(
        f'<li><svg class="key {shade}" viewBox="0 0 26 6" aria-hidden="true"><path class="line" d="M0 3H26"/></svg>'
        f"{escape(line.label)}</li>"
        for line, shade in zip(plot.lines, shades, strict=True)
    )
    if any(line.published for line in plot.lines):
        keys += f'<li class="soft">{HOLLOW}the paper</li>'
    name = escape(plot.anchor)
    return (
        f'<figure id="{name}"><figcaption>{escape(plot.title)} <span>{escape(plot.y)}</span></figcaption>\n'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(plot.title)}</title><desc id="{name}-desc">{escape(plot.description)}</desc>'
        f'{"".join(parts)}</svg>\n<ul class="keys">{keys}</ul></figure>'
    )


SPREAD = 4
"""Pixels between the points of a place, where scores are compared with published ones."""

HOLLOW = (
    '<svg class="key published shade-none" viewBox="0 0 26 6" aria-hidden="true"><path class="line" d="M0 3H26"/>'
    '<circle cx="13" cy="3" r="3"/></svg>'
)
"""Legend entry of published scores."""


def palette(lighter: bool = False) -> str:
    """CSS of every shade; `lighter` is for dark mode."""
    return "\n".join(f".shade-{k} {{ --shade: {_lighter(c) if lighter else c}; }}" for k, c in enumerate(SHADES))


Axis = Callable[[float], float]


def _shades(lines: Sequence[Line]) -> list[str]:
    """CSS classes of each line: an algorithm's own colour for the line of its name, or else for its first line.

    Other lines use the remaining colours; once all are used, the colours repeat with other dashes.
    """
    first = {line.algorithm: k for k, line in reversed(list(enumerate(lines))) if line.algorithm in COLOURS}
    first |= {line.algorithm: k for k, line in enumerate(lines) if line.label.lower() == line.algorithm in COLOURS}
    own = {k: f"shade-{SHADES.index(COLOURS[name])} dash-0" for name, k in first.items()}
    every = (f"shade-{shade} dash-{dash}" for dash in itertools.count() for shade in range(len(SHADES)))
    free = (look for look in every if look not in own.values())
    return [own[k] if k in own else next(free) for k in range(len(lines))]


def _published(line: Line, shade: str, across: Axis, up: Axis) -> str:
    """Published scores: hollow dots with bars, joined by a dotted line."""
    if not line.published:
        return ""
    points = [(across(x), up(mean)) for x, mean, _ in line.published]
    bars = "".join(_bar(across(x), up(mean - std), up(mean + std)) for x, mean, std in line.published)
    return f'<g class="{shade} published"><path class="line" d="{_path(points)}"/>{bars}{_dots(points)}</g>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _bar(x: float, low: float, high: float) -> str:
    return f'<path class="bar-of" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'


def _dots(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)


def _curve(line: Line, shade: str, across: Axis, up: Axis) -> str:
    if not line.points:
        return ""
    points = [(across(x), up(y)) for x, y in line.points]
    if line.dots:
        bars = "".join(_bar(x, up(low), up(high)) for (x, _), (low, high) in zip(points, line.band, strict=False))
        return f'<g class="{shade}"><path class="line" d="{_path(points)}"/>{bars}{_dots(points)}</g>'
    band = ""
    if line.band:
        places = [x for x, _ in points]
        edge = [(x, up(low)) for x, (low, _) in zip(places, line.band, strict=True)]
        edge += [(x, up(high)) for x, (_, high) in reversed(list(zip(places, line.band, strict=True)))]
        band = f'<path class="band" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in edge)}Z"/>'
    return f'<g class="{shade}">{band}<path class="line" d="{_path(points)}"/></g>'


def _moved(axis: Axis, by: float) -> Axis:
    return lambda value: axis(value) + by


def _scale(values: Sequence[float], start: float, end: float, logarithmic: bool) -> Axis:
    low, high = min(values), max(values)
    if logarithmic:
        inner = _scale([math.log(low), math.log(high)], start, end, False)
        return lambda value: inner(math.log(value))
    if low == high:
        low, high = low - 0.5, high + 0.5
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _round_numbers(low: float, high: float) -> list[float]:
    """About four or five round numbers between two, for axis ticks.

    >>> _round_numbers(12.5, 83.1)
    [20, 40, 60, 80]
    """
    if low == high:
        return [low]
    width = (high - low) / 4
    ten = 10 ** math.floor(math.log10(width))
    step = min((factor * ten for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / width)))
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _lighter(colour: str) -> str:
    """The same hue, readable on black.

    >>> _lighter("#1c1c1c"), _lighter("#0b6bb5")
    ('#d2d2d2', '#6da6d3')
    """
    share = 0.8 if colour == COLOURS["sgdm-n"] else 0.4
    channels = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(c + share * (255 - c)):02x}" for c in channels)
