"""A report as Markdown, for READMEs."""

from __future__ import annotations

from quasiglobal.common.files import markdown_table
from quasiglobal.reproduction.report.document import Document, Section


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
