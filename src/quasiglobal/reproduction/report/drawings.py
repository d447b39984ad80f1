"""Conversion of matplotlib figures to inline SVG."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from quasiglobal.reproduction.report.document import Drawing
from quasiglobal.runs.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
