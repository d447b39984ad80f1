"""The grid of a report: one square per cell of the tables, by agreement with the published number.

On the page the grid is one small table per section, with links to the rows; `grid` draws it as a picture for READMEs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import pairwise
from textwrap import wrap

from quasiglobal.reproduction.report.document import Agreement, Document, Row, Section


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


def theme() -> str:
    """CSS of the colours of the page and of the squares, in light and dark mode."""
    page = resources.files("quasiglobal.reproduction.report").joinpath("theme.css").read_text(encoding="utf-8")
    light = "\n".join(f".{kind} {{ --square: {look.light}; }}" for kind, look in LOOKS.items())
    dark = "\n".join(f".{kind} {{ --square: {look.dark}; }}" for kind, look in LOOKS.items())
    return f"{page}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{SQUARES}\n"


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


def columns_of(section: Section) -> dict[str, list[str]]:
    """The columns of a section's grid, the second cells of its rows, by group: the text before the last comma."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(row.cells[1].text for row in section.rows):
        groups.setdefault(name.rpartition(", ")[0], []).append(name)
    return groups


def methods_of(section: Section) -> dict[str, dict[str, Row]]:
    """The rows of a section by method, the first cell, and column."""
    methods: dict[str, dict[str, Row]] = {}
    for row in section.rows:
        methods.setdefault(row.cells[0].text, {})[row.cells[1].text] = row
    return methods


# ------------------------------------------------------------------------------------------------ on the page


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
    groups, done = columns_of(section), sum(row.known for row in section.rows)
    columns = [column for group in groups.values() for column in group]
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    starts = {group[0] for group in groups.values()}
    lines, last = [], ""
    for name, cells in methods_of(section).items():
        model, _, method = name.rpartition(": ")
        if model != last:
            width = len(columns) + 1
            lines.append(f'<tr><th class="model" scope="rowgroup" colspan="{width}">{escape(model)}</th></tr>')
            last = model
        squares = "".join(
            f"<td{' class=start' if column in starts else ''}>{_link(section, cells.get(column))}</td>"
            for column in columns
        )
        lines.append(f'<tr><th scope="row">{escape(method)}</th>{squares}</tr>')
    return (
        f'<div><h3><a href="#{section.anchor}">{escape(section.brief)}</a> '
        f"<span>{done} of {len(section.rows)}</span></h3>"
        f'<p class="columns" aria-hidden="true">{escape(_in_short(groups))}</p>'
        f'<table class="grid"><thead class="unseen"><tr><th>method</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _in_short(groups: Mapping[str, Sequence[str]]) -> str:
    """The columns by group, without repetitions.

    >>> _in_short({"ring 16": ["ring 16, iid", "ring 16, α = 1", "ring 16, α = 0.1"], "": ["BN"]})
    'ring 16: iid, α = 1, 0.1; BN'
    """
    said = []
    for group, columns in groups.items():
        names = [column.removeprefix(f"{group}, ") for column in columns]
        again = [name.removeprefix("α = ") if before.startswith("α = ") else name for before, name in pairwise(names)]
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


# ------------------------------------------------------------------------------------------------ as a picture

WIDTH, MARGIN, LABELS = 880, 16, 412
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
        done = f"{sum(row.known for row in section.rows)} of {len(section.rows)}"
        parts.append(f'<text x="{MARGIN}" y="{y + 11}">{escape(section.brief)}</text>')
        parts.append(f'<text class="soft" x="{LABELS - 10}" y="{y + 11}" text-anchor="end">{done}</text>')
        x = LABELS
        for cells in methods_of(section).values():
            if x + STEP * len(cells) > WIDTH - MARGIN:
                x, y = LABELS, y + STEP
            parts += [square(row.agreement, x + STEP * k, y) for k, row in enumerate(cells.values()) if row.agreement]
            x += STEP * len(cells) + GAP
        y += LINE
    height = y + MARGIN - 8
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{escape(f"{document.title}: {says}")}</title>
<style>
{theme()}svg {{ font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }}
.back {{ fill: var(--paper); stroke: var(--line); }}
text {{ fill: var(--ink); }} .soft {{ fill: var(--soft); }} .head {{ font-size: 13px; font-weight: 600; }}
</style>
<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>
{body}
</svg>
"""
