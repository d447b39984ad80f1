"""A report as one self-contained HTML file: style, script and figures are inline."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from quasiglobal.reproduction.report.document import Cell, Column, Document, Drawing, Finding, Line, Plot, Row, Section
from quasiglobal.reproduction.report.grid import gridded, page_grid, theme
from quasiglobal.runs.plots import COLOURS, CYCLE, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page(document: Document) -> str:
    """Render the whole HTML file."""
    files = resources.files("quasiglobal.reproduction.report")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    dark = f"@media (prefers-color-scheme: dark) {{\n{palette(lighter=True)}\n}}"
    title = escape(document.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{theme()}{style}{palette()}
{dark}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
{_paragraphs(document.says)}
{_overview(document) if document.overview else ""}
<nav aria-label="Contents">{_contents(document)}</nav>
</header>
<div class="bar"><form>
<label>Algorithm <select id="algorithm" autocomplete="off">{_algorithms(document)}</select></label>
<label><input type="checkbox" id="known" autocomplete="off"> only what was run</label>
</form></div>
<main>
{_lines(map(_section, document.sections))}
{_lines(map(_drawing, document.drawings))}
</main>
<footer id="legend">
<h2>How to read it</h2>
{_paragraphs(document.legend)}
</footer>
<script>
{script}</script>
</body>
</html>
"""


def _overview(document: Document) -> str:
    """The grid of all cells, the claims in a line each, and the published figures beside ours."""
    overview = document.overview
    assert overview
    figures = f'<div class="plots">\n{_lines(map(figure, overview.plots))}\n</div>'
    plots = f"<h2>The paper's figures, with our results over them</h2>\n{figures}" if overview.plots else ""
    return f"""<p class="headline">{escape(overview.says)}</p>
{page_grid(document)}
<h2>What the paper claims, and whether it holds in our runs</h2>
<ul class="findings">
{_lines(map(_finding, overview.findings))}
</ul>
{plots}"""


def _finding(one: Finding) -> str:
    sign = f'<span class="{one.verdict.mark}" aria-hidden="true">{escape(one.sign)}</span>'
    verdict = f'<span class="{one.verdict.mark}">{escape(one.verdict.text)}</span>'
    link = f'<a href="#{escape(one.link)}">{_unbroken(one.says)}</a>'
    return f'<li>{sign}{link}{verdict}<span class="soft">{escape(one.extent)}</span></li>'


def _contents(document: Document) -> str:
    """Links to the parts that the overview does not link to."""
    linked = gridded(document) if document.overview else []
    titles = {section.anchor: section.title for section in document.sections if section not in linked}
    titles |= {one.anchor: one.title for one in document.drawings} | {"legend": "How to read it"}
    return " · ".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in titles.items())


def _algorithms(document: Document) -> str:
    names = dict.fromkeys(row.algorithm for section in document.sections for row in section.rows if row.algorithm)
    return '<option value="">all</option>' + "".join(f"<option>{escape(name)}</option>" for name in names)


def _section(section: Section) -> str:
    plots = f'<div class="plots">\n{_lines(map(figure, section.plots))}\n</div>' if section.plots else ""
    widths = [column.share for column in section.columns]
    notes = "".join(f'<p class="notes">{escape(note)}</p>\n' for note in section.notes)
    return f"""<section id="{section.anchor}">
<details{" open" if section.known else ""}>
<summary><h2>{escape(section.title)}</h2><span class="soft">{escape(section.says)}</span></summary>
<div class="wide"><table role="table"{" class=prose" if any(widths) else ""}>
<colgroup>{"".join(f'<col style="width:{100 * width:.0f}%">' if width else "<col>" for width in widths)}</colgroup>
<thead role="rowgroup"><tr role="row">{"".join(map(_head, section.columns))}</tr></thead>
<tbody role="rowgroup">
{_lines(_row(row, section.columns) for row in section.rows)}
</tbody>
</table></div>
<p class="soft nothing" hidden>Nothing here with this choice.</p>
{notes}{plots}
</details>
</section>"""


def _drawing(drawing: Drawing) -> str:
    return f"""<section id="{drawing.anchor}">
<details open>
<summary><h2>{escape(drawing.title)}</h2></summary>
<div class="wide drawing">{drawing.svg}</div>
<p class="notes">{escape(drawing.says)}</p>
</details>
</section>"""


def _head(column: Column) -> str:
    kind = ' class="number"' if column.numeric else ""
    return f'<th role="columnheader" scope="col"{kind}><button type="button">{escape(column.title)}</button></th>'


def _row(row: Row, columns: tuple[Column, ...]) -> str:
    cells = "".join(_cell(cell, column) for cell, column in zip(row.cells, columns, strict=True))
    anchor = f' id="{escape(row.anchor)}"' if row.anchor else ""
    known = "" if row.known else " class=absent"
    return f'<tr role="row"{anchor} data-algorithm="{escape(row.algorithm)}"{known}>{cells}</tr>'


def _cell(cell: Cell, column: Column) -> str:
    text = _unbroken(cell.text)
    if cell.link:
        text = f'<a href="#{escape(cell.link)}">{text}</a>'
    if cell.mark:
        text = f'<span class="{cell.mark}">{text}</span>'
    kind = "number" if column.numeric else "text" if column.share is None else "words"
    by = "" if cell.sort is None else f"{cell.sort:.10g}"
    sort = f' data-sort="{by}"' if column.numeric else ""
    return f'<td role="cell" class="{kind}" data-label="{escape(column.title)}"{sort}>{text}{_why(cell.why)}</td>'


def _why(lines: tuple[str, ...]) -> str:
    first, *others = (f'<span class="why">{_unbroken(line)}</span>' for line in lines or ("",))
    if others:
        return f"<details><summary>{first}</summary>{''.join(others)}</details>"
    return first if lines else ""


def _unbroken(text: str) -> str:
    """Escape a text; keep equations, numbers with ± and ring sizes on one line."""
    return escape(text).replace(" = ", "\u00a0=\u00a0").replace(" ± ", "\u00a0±\u00a0").replace("ring ", "ring\u00a0")


def _paragraphs(texts: tuple[str, ...]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)


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


POINTS = 72
"""Points per inch; a point is the unit of matplotlib's SVG."""

SIZE = 1.25
"""Scale of a figure on the page, in pixels per point."""


def drawing(name: str, title: str, says: str, figure: Figure) -> Drawing:
    """Convert a figure: make its ids unique on the page, and drop styles that would affect the rest of the page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with style(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", text)
    width, height = (POINTS * inches for inches in figure.get_size_inches())
    head = (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="width:{SIZE * width:.0f}px" role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(says)}</desc>'
    )
    return Drawing(name, title, says, head + text[text.index(">") + 1 :].strip())
