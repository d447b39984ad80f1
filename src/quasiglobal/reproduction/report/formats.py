"""A report as files: one HTML page, Markdown for READMEs, LaTeX for papers, and a picture of its grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from quasiglobal.common.files import markdown_table, replacing
from quasiglobal.reproduction.report.document import Cell, Column, Document, Section
from quasiglobal.reproduction.report.page import grid, page


def markdown(document: Document) -> str:
    """Render a whole report."""
    headline = (document.overview.says,) if document.overview else ()
    paragraphs = [f"# {escaped(document.title)}", *map(escaped, (*headline, *document.says))]
    for section in document.sections:
        paragraphs += [f"## {escaped(section.title)}", escaped(section.says), _rows(section)]
        paragraphs += [escaped(note) for note in section.notes]
    for one in document.drawings:
        paragraphs += [f"## {escaped(one.title)}", escaped(one.says)]
    return "\n\n".join([*paragraphs, *map(escaped, document.legend)]) + "\n"


def escaped(text: str) -> str:
    r"""Escape a text for Markdown.

    >>> print(escaped("a|b *c* <d>"))
    a\|b \*c\* &lt;d>
    """
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _rows(section: Section) -> str:
    chosen = [k for k, column in enumerate(section.columns) if column.brief]
    heads = [escaped(section.columns[k].title) for k in chosen]
    return markdown_table(heads, [[escaped(row.cells[k].sentence) for k in chosen] for row in section.rows])


SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "−": "$-$", "α": r"$\alpha$", "β": r"$\beta$", "τ": r"$\tau$", "μ": r"$\mu$",
    "²": "$^2$", "₊": "$_+$", "⋆": r"$\star$", "∞": r"$\infty$", "“": "``", "”": "''",
}
"""LaTeX source of characters that pdflatex treats as special or does not know."""


def latex(document: Document) -> str:
    """The tables of a report, for \\input in your own paper."""
    needs = "% \\usepackage{amssymb,array,booktabs,longtable,pdflscape}"
    begin = r"\begin{landscape}\footnotesize\setlength{\tabcolsep}{3pt}"
    tables = map(_table, document.sections)
    return "\n\n".join([f"% {document.title}\n{needs}", begin, *tables, r"\end{landscape}"]) + "\n"


def tex(text: str) -> str:
    r"""Escape a text for LaTeX.

    >>> print(tex("82.20 ± 1.27 % of D²₊"))
    82.20 $\pm$ 1.27 \% of D$^2$$_+$
    """
    return "".join(SIGNS.get(sign, sign) for sign in text)


def _table(section: Section) -> str:
    chosen = [k for k, column in enumerate(section.columns) if column.brief]
    first = replace(section.columns[0], share=section.columns[0].share or FIRST)
    form = "".join(map(_latex_column, [first, *(section.columns[k] for k in chosen[1:])]))
    heads = " & ".join(tex(section.columns[k].title) for k in chosen)
    rows = [" & ".join(_latex_cell(row.cells[k], section.columns[k]) for k in chosen) + r" \\" for row in section.rows]
    return "\n".join([
        rf"\begin{{longtable}}{{{form}}}",
        rf"\caption{{{tex(section.title)}. {tex(section.says)}}}\label{{tab:qg-{section.anchor}}} \\",
        r"\toprule", rf"{heads} \\", r"\midrule", r"\endhead",
        *rows,
        r"\bottomrule",
        r"\end{longtable}",
        *(rf"\noindent {tex(note)}\par" for note in section.notes),
    ])


FIRST = 0.2
"""Default fraction of the page width for the first column, which has the longest texts."""


def _latex_column(column: Column) -> str:
    if column.share is not None:
        return rf">{{\raggedright\arraybackslash}}p{{{column.share:g}\linewidth}}"
    return "r" if column.numeric else "l"


def _latex_cell(cell: Cell, column: Column) -> str:
    return tex(cell.sentence if column.numeric or column.share is not None else cell.text)


FORMATS = {
    "html": ("index.html", page), "markdown": ("tables.md", markdown), "latex": ("tables.tex", latex),
    "svg": ("grid.svg", grid),
}
"""The file of each format, and the function that renders it."""


def write_report(document: Document, folder: Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write the report in each format into a folder."""
    paths = []
    for name in formats:
        file, render = FORMATS[name]
        with replacing(folder / file) as temporary:
            temporary.write_text(render(document), encoding="utf-8")
        paths.append(folder / file)
    return paths
