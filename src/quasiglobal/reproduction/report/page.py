"""A report as one self-contained HTML file: style, script and figures are inline."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources

from quasiglobal.reproduction.report.document import Cell, Column, Document, Drawing, Finding, Row, Section
from quasiglobal.reproduction.report.grid import gridded, page_grid, theme
from quasiglobal.reproduction.report.svg import figure, palette


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
