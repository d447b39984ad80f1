"""Curves as a small inline SVG with colours from the page's CSS, in light and dark mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from html import escape

from quasiglobal.report.document import Line, Plot
from quasiglobal.report.plots import COLOURS, CYCLE

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 10, 34
SHADES = tuple(dict.fromkeys([*CYCLE, *COLOURS.values()]))
"""Line colours; each has a CSS class (`shade-0`, `shade-1`, …), so that dark mode can change it."""


def figure(plot: Plot) -> str:
    """Render a plot as an HTML figure with a legend and a text alternative for screen readers."""
    shades = _shades(plot.lines)
    across = _scale([x for line in plot.lines for x, _ in line.points], LEFT, WIDTH - RIGHT, plot.logarithmic)
    heights = [y for line in plot.lines for _, y in line.points]
    heights += [y for line in plot.lines for pair in line.band for y in pair]
    up = _scale(heights, HEIGHT - BOTTOM, TOP, False)
    rates = sorted({x for line in plot.lines for x, _ in line.points})
    marks = rates if plot.logarithmic else _round_numbers(min(rates), max(rates))
    levels = _round_numbers(min(heights), max(heights))
    parts = [
        *(f'<path class="grid" d="M{LEFT} {up(y):.1f}H{WIDTH - RIGHT}"/>' for y in levels),
        *(f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>' for y in levels),
        *(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:g}</text>' for x in marks),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(plot.x)}</text>',
        *(_curve(line, shade, across, up) for line, shade in zip(plot.lines, shades, strict=True)),
    ]
    keys = "".join(
        f'<li><svg class="key {shade}" viewBox="0 0 26 6" aria-hidden="true"><path class="line" d="M0 3H26"/></svg>'
        f"{escape(line.label)}</li>"
        for line, shade in zip(plot.lines, shades, strict=True)
    )
    name = escape(plot.anchor)
    return (
        f'<figure id="{name}"><figcaption>{escape(plot.title)} <span>{escape(plot.y)}</span></figcaption>\n'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(plot.title)}</title><desc id="{name}-desc">{escape(plot.description)}</desc>'
        f'{"".join(parts)}</svg>\n<ul class="keys">{keys}</ul></figure>'
    )


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


def _curve(line: Line, shade: str, across: Axis, up: Axis) -> str:
    points = [(across(x), up(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    band = ""
    if line.band:
        places = [x for x, _ in points]
        edge = [(x, up(low)) for x, (low, _) in zip(places, line.band, strict=True)]
        edge += [(x, up(high)) for x, (_, high) in reversed(list(zip(places, line.band, strict=True)))]
        band = f'<path class="band" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in edge)}Z"/>'
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points) if line.dots else ""
    return f'<g class="{shade}">{band}<path class="line" d="{path}"/>{dots}</g>'


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
