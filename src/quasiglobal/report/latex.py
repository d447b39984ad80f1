"""A report's tables as LaTeX, for papers: booktabs rules, and longtable where a page is too short."""

from __future__ import annotations

from quasiglobal.report.document import Document, Section

SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "α": r"$\alpha$", "β": r"$\beta$",
    "τ": r"$\tau$", "μ": r"$\mu$", "η": r"$\eta$", "‖": r"$\|$", "²": "$^2$", "₊": "$_+$", "⋆": r"$\star$", "≤": r"$\le$",
    "√": r"$\sqrt{}$", "₁": "$_1$", "₂": "$_2$", "≈": r"$\approx$", "✓": r"\checkmark{}", "✗": r"$\times$", "·": r"$\cdot$",
    "×": r"$\times$", "–": "--", "“": "``", "”": "''", "’": "'", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip
"""What pdflatex reads for a sign that it would take amiss or not know."""


def latex(document: Document) -> str:
    """The tables of a report, to be read by a paper of your own with \\input."""
    needs = "% \\usepackage{booktabs,longtable,amssymb}"
    return "\n\n".join([f"% {document.title}\n{needs}", *map(_table, document.sections)]) + "\n"


def escaped(text: str) -> str:
    r"""A text that LaTeX prints as it is.

    >>> print(escaped("82.20 ± 1.27 % of D²₊"))
    82.20 $\pm$ 1.27 \% of D$^2$$_+$
    """
    return "".join(SIGNS.get(sign, sign) for sign in text)


def _table(section: Section) -> str:
    chosen = [k for k, column in enumerate(section.columns) if column.brief]
    form = "".join("r" if section.columns[k].numeric else "l" for k in chosen)
    heads = " & ".join(escaped(section.columns[k].title) for k in chosen)
    rows = [" & ".join(escaped(row.cells[k].text) for k in chosen) + r" \\" for row in section.rows]
    return "\n".join([
        rf"\begin{{longtable}}{{{form}}}",
        rf"\caption{{{escaped(section.title)}. {escaped(section.says)}}}\label{{tab:qg-{section.anchor}}} \\",
        r"\toprule", rf"{heads} \\", r"\midrule", r"\endhead",
        *rows,
        r"\bottomrule",
        r"\end{longtable}",
    ])  # fmt: skip
