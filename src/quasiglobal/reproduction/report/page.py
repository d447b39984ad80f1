"""A report as one self-contained HTML file (`page.html`): style, script and figures are inline; and its grid.

The grid has one square per cell of the tables, by agreement with the published number. On the page it is one small
table per section, with links to the rows; `grid` draws it as a picture for READMEs.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from textwrap import wrap
from typing import TYPE_CHECKING

from quasiglobal.reproduction.report.document import (
    Agreement,
    Cell,
    Column,
    Document,
    Drawing,
    Finding,
    Line,
    Plot,
    Row,
    Section,
)
from quasiglobal.runs.plots import COLOURS, CYCLE, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quasiglobal.reproduction.paper.tables import ColumnLabel, RowLabel


def page(document: Document) -> str:
    """Render the whole HTML file."""
    dark = f"@media (prefers-color-scheme: dark) {{\n{palette(lighter=True)}\n}}"
    return Template(_file("page.html")).substitute(
        title=escape(document.title),
        style=f"{theme()}{_file('page.css')}{palette()}\n{dark}",
        script=_file("page.js"),
        says=_paragraphs(document.says),
        overview=_overview(document) if document.overview else "",
        contents=_contents(document),
        algorithms=_algorithms(document),
        sections=_lines(map(_section, document.sections)),
        drawings=_lines(map(_drawing, document.drawings)),
        legend=_paragraphs(document.legend),
    )


def _overview(document: Document) -> str:
    """The grid of all cells, one line per claim, and the published figures with our results."""
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
    return _lines(f"<p>{escape(text)}</p>" for text in texts)


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
"""Pixels between our score and the published one at the same place."""

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
    points = [(across(x), up(mean)) for x, mean, _ in line.published]
    bars = [(up(mean - std), up(mean + std)) for _, mean, std in line.published]
    return _dotted(f"{shade} published", points, bars) if points else ""


def _curve(line: Line, shade: str, across: Axis, up: Axis) -> str:
    points = [(across(x), up(y)) for x, y in line.points]
    band = [(up(low), up(high)) for low, high in line.band]
    if line.dots and points:
        return _dotted(shade, points, band)
    edge = [(x, low) for (x, _), (low, _) in zip(points, band, strict=False)]
    edge += [(x, high) for (x, _), (_, high) in zip(points[::-1], band[::-1], strict=False)]
    shape = f'<path class="band" d="{_path(edge)}Z"/>' if edge else ""
    return f'<g class="{shade}">{shape}<path class="line" d="{_path(points)}"/></g>' if points else ""


def _dotted(look: str, points: Sequence[tuple[float, float]], bars: Sequence[tuple[float, float]]) -> str:
    spans = "".join(
        f'<path class="bar-of" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
        for (x, _), (low, high) in zip(points, bars, strict=False)
    )
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    return f'<g class="{look}"><path class="line" d="{_path(points)}"/>{spans}{dots}</g>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


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


# ------------------------------------------------------------------------------------------------ the grid


@dataclass(frozen=True)
class Look:
    """Look of an agreement: legend, colours of the square in light and dark mode, and a sign that needs no colour."""

    legend: str
    light: str
    dark: str
    sign: str = ""
    """SVG path in a square of size 14, drawn in the colour of the page."""
    hollow: bool = False


LOOKS: dict[Agreement, Look] = {
    "within": Look("within the noise", "#1f8a70", "#3fb497"),
    "above": Look("above, beyond the noise", "#1769aa", "#6cb2ee", "M7 3.4L11 10H3z"),
    "below": Look("below, beyond the noise", "#c4511b", "#f0935f", "M7 10.6L3 4h8z"),
    "neither": Look(
        "diverged, as in the paper", "#6b5b95", "#b3a2dd", "M4 3l3 3 3-3 1 1-3 3 3 3-1 1-3-3-3 3-1-1 3-3-3-3z"
    ),
    "open": Look("no verdict", "#66717a", "#9aa5ae", "M7 5a2 2 0 1 0 .01 0z", hollow=True),
    "absent": Look("not run", "#b9c2c9", "#4d5961", hollow=True),
}
"""How squares look; colours are told apart with the common kinds of colour blindness, signs without any colour."""

SIDE = 14
"""Size of a square."""


def gridded(document: Document) -> list[Section]:
    """The sections whose rows are cells of the grid."""
    return [section for section in document.sections if any(row.agreement for row in section.rows)]


def _used(document: Document) -> list[Agreement]:
    found = {row.agreement for section in document.sections for row in section.rows}
    return [kind for kind in LOOKS if kind in found]


def _file(name: str) -> str:
    return resources.files("quasiglobal.reproduction.report").joinpath(name).read_text(encoding="utf-8")


def theme() -> str:
    """CSS of the colours of the page and of the squares, in light and dark mode."""
    light = "\n".join(f".{kind} {{ --square: {look.light}; }}" for kind, look in LOOKS.items())
    dark = "\n".join(f".{kind} {{ --square: {look.dark}; }}" for kind, look in LOOKS.items())
    return f"{_file('theme.css')}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{SQUARES}\n"


SQUARES = """.square { fill: var(--square); stroke: var(--square); stroke-width: 1.4; }
.hollow .square { fill: none; }
.sign { fill: var(--paper); }
.hollow .sign { fill: var(--square); }"""
"""CSS of the squares' shapes."""


def square(kind: Agreement, x: float = 0, y: float = 0) -> str:
    """A square as SVG."""
    look = LOOKS[kind]
    sign = f'<path class="sign" d="{look.sign}"/>' if look.sign else ""
    place = f' transform="translate({x:g} {y:g})"' if x or y else ""
    return (
        f'<g class="{kind}{" hollow" if look.hollow else ""}"{place}>'
        f'<rect class="square" x=".7" y=".7" width="{SIDE - 1.4:g}" height="{SIDE - 1.4:g}" rx="2"/>{sign}</g>'
    )


def page_grid(document: Document) -> str:
    """HTML of the grid with its legend: a table per section, whose squares are links to the rows."""
    used = _used(document)
    symbols = "".join(
        f'<symbol id="square-{kind}" viewBox="0 0 {SIDE} {SIDE}">{square(kind)}</symbol>' for kind in used
    )
    legend = "".join(f"<li>{_use(kind)} {LOOKS[kind].legend}</li>" for kind in used)
    tables = "\n".join(map(_table, gridded(document)))
    return (
        f'<svg class="unseen" aria-hidden="true">{symbols}</svg>\n<ul class="legend">{legend}</ul>\n'
        f'<div class="grids">\n{tables}\n</div>\n<div id="tip" hidden></div>'
    )


def _use(kind: Agreement) -> str:
    return f'<svg class="cell" viewBox="0 0 {SIDE} {SIDE}" aria-hidden="true"><use href="#square-{kind}"/></svg>'


def _table(section: Section) -> str:
    methods = _methods(section)
    groups: dict[str, list[ColumnLabel]] = {}
    for column in dict.fromkeys(row.place[1] for row in section.rows if row.place):
        groups.setdefault(column.group, []).append(column)
    columns = [column for group in groups.values() for column in group]
    heads = "".join(f'<th scope="col">{escape(str(column))}</th>' for column in columns)
    lines, last = [], ""
    for label, cells in methods.items():
        if label.model != last:
            width, last = len(columns) + 1, label.model
            lines.append(f'<tr><th class="model" scope="rowgroup" colspan="{width}">{escape(last)}</th></tr>')
        squares = "".join(
            f"<td{' class=start' if column is groups[column.group][0] else ''}>{_link(section, cells.get(column))}</td>"
            for column in columns
        )
        lines.append(f'<tr><th scope="row">{escape(label.method)}</th>{squares}</tr>')
    return (
        f'<div><h3><a href="#{section.anchor}">{escape(section.brief)}</a> '
        f"<span>{_done(section)}</span></h3>"
        f'<p class="columns" aria-hidden="true">{escape(_in_short(groups))}</p>'
        f'<table class="grid"><thead class="unseen"><tr><th>method</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _methods(section: Section) -> dict[RowLabel, dict[ColumnLabel, Row]]:
    """The rows of a section by method and column."""
    methods: dict[RowLabel, dict[ColumnLabel, Row]] = {}
    for row in section.rows:
        if row.place:
            methods.setdefault(row.place[0], {})[row.place[1]] = row
    return methods


def _done(section: Section) -> str:
    return f"{sum(row.known for row in section.rows)} of {len(section.rows)}"


def _in_short(groups: Mapping[str, Sequence[ColumnLabel]]) -> str:
    """The columns by group, without repetitions.

    >>> from quasiglobal.reproduction.paper.tables import ColumnLabel
    >>> ring = [ColumnLabel(setting, "ring 16") for setting in ("iid", "α = 1", "α = 0.1")]
    >>> _in_short({"ring 16": ring, "": [ColumnLabel("BN")]})
    'ring 16: iid, α = 1, 0.1; BN'
    """
    said = []
    for group, columns in groups.items():
        names = [column.setting for column in columns]
        pairs = itertools.pairwise(names)
        again = [name.removeprefix("α = ") if before.startswith("α = ") else name for before, name in pairs]
        said.append((f"{group}: " if group else "") + ", ".join([names[0], *again]))
    return "; ".join(said)


def _link(section: Section, row: Row | None) -> str:
    if row is None or row.agreement is None:
        return ""
    said = "; ".join(_in_words(section, row))
    return f'<a href="#{escape(row.anchor)}" aria-label="{escape(said)}">{_use(row.agreement)}</a>'


TOLD = ("paper", "ours", "difference", "noise")
"""Columns of a square's text."""


def _in_words(section: Section, row: Row) -> Iterator[str]:
    """Name and numbers of a cell."""
    yield f"{row.cells[0].text}, {row.cells[1].text}"
    for column, cell in zip(section.columns, row.cells, strict=True):
        if column.title in TOLD and cell.text:
            yield f"{column.title} {cell.sentence}"


PICTURE, MARGIN, LABELS = 880, 16, 412
"""Width of the picture, its margin, and the place where the squares begin."""

STEP, GAP, LINE = 16, 6, 22
"""Distances between squares, additionally between methods, and between sections."""


def grid(document: Document) -> str:
    """The grid as an SVG file with a legend, in light and dark mode: a line of squares per section, folded."""
    says = document.overview.says if document.overview else ""
    parts, y = [], MARGIN
    for line in wrap(says, 115):
        y += 18
        parts.append(f'<text class="head" x="{MARGIN}" y="{y - 4}">{escape(line)}</text>')
    x, y = MARGIN, y + 10
    for kind in _used(document):
        legend = LOOKS[kind].legend
        parts += [square(kind, x, y), f'<text x="{x + SIDE + 5}" y="{y + 11}">{legend}</text>']
        x += SIDE + 20 + round(6.4 * len(legend))
    y += LINE + 10
    for section in gridded(document):
        parts.append(f'<text x="{MARGIN}" y="{y + 11}">{escape(section.brief)}</text>')
        parts.append(f'<text class="soft" x="{LABELS - 10}" y="{y + 11}" text-anchor="end">{_done(section)}</text>')
        x = LABELS
        for cells in _methods(section).values():
            if x + STEP * len(cells) > PICTURE - MARGIN:
                x, y = LABELS, y + STEP
            parts += [square(row.agreement, x + STEP * k, y) for k, row in enumerate(cells.values()) if row.agreement]
            x += STEP * len(cells) + GAP
        y += LINE
    height = y + MARGIN - 8
    size = f'viewBox="0 0 {PICTURE} {height}" width="{PICTURE}" height="{height}"'
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{escape(f"{document.title}: {says}")}</title>
<style>
{theme()}svg {{ font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }}
.back {{ fill: var(--paper); stroke: var(--line); }}
text {{ fill: var(--ink); }} .soft {{ fill: var(--soft); }} .head {{ font-size: 13px; font-weight: 600; }}
</style>
<rect class="back" x=".5" y=".5" width="{PICTURE - 1}" height="{height - 1}" rx="8"/>
{body}
</svg>
"""
