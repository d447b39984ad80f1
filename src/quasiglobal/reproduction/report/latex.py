"""A report as LaTeX, for papers: booktabs rules, longtable for page breaks, landscape for width."""

from __future__ import annotations

from dataclasses import replace

from quasiglobal.reproduction.report.document import Cell, Column, Document, Section

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


def escaped(text: str) -> str:
    r"""Escape a text for LaTeX.

    >>> print(escaped("82.20 ± 1.27 % of D²₊"))
    82.20 $\pm$ 1.27 \% of D$^2$$_+$
    """
    return "".join(SIGNS.get(sign, sign) for sign in text)


def _table(section: Section) -> str:
    chosen = [k for k, column in enumerate(section.columns) if column.brief]
    first = replace(section.columns[0], share=section.columns[0].share or FIRST)
    form = "".join(map(_form, [first, *(section.columns[k] for k in chosen[1:])]))
    heads = " & ".join(escaped(section.columns[k].title) for k in chosen)
    rows = [" & ".join(_text(row.cells[k], section.columns[k]) for k in chosen) + r" \\" for row in section.rows]
    return "\n".join([
        rf"\begin{{longtable}}{{{form}}}",
        rf"\caption{{{escaped(section.title)}. {escaped(section.says)}}}\label{{tab:qg-{section.anchor}}} \\",
        r"\toprule", rf"{heads} \\", r"\midrule", r"\endhead",
        *rows,
        r"\bottomrule",
        r"\end{longtable}",
        *(rf"\noindent {escaped(note)}\par" for note in section.notes),
    ])


FIRST = 0.2
"""Default fraction of the page width for the first column, which has the longest texts."""


def _form(column: Column) -> str:
    if column.share is not None:
        return rf">{{\raggedright\arraybackslash}}p{{{column.share:g}\linewidth}}"
    return "r" if column.numeric else "l"


def _text(cell: Cell, column: Column) -> str:
    return escaped(cell.sentence if column.numeric or column.share is not None else cell.text)
