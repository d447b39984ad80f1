"""A report as files: one HTML page, Markdown, LaTeX and a picture of its grid."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quasiglobal.common.files import replacing
from quasiglobal.reproduction.report.document import Document
from quasiglobal.reproduction.report.grid import grid
from quasiglobal.reproduction.report.latex import latex
from quasiglobal.reproduction.report.markdown import markdown
from quasiglobal.reproduction.report.page import page

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
