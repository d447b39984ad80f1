"""The paper's training figures in the report, drawn from the outcomes of their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quasiglobal.reproduction.paper.cells import Scale
from quasiglobal.reproduction.paper.figures import TRAINED, Canvas, draw_outcomes, title_of
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.report.document import Drawing
from quasiglobal.reproduction.report.drawings import drawing


def summary_figures(found: Mapping[str, Sequence[Outcome]], scale: Scale) -> tuple[Drawing, ...]:
    """The paper's training figures that show more than the tables' curves, if enough of their cells were run."""
    made = []
    for name in FIGURES:
        if sum(bool(outcome.runs) for outcome in found[name]) >= ENOUGH * len(found[name]):
            figure = draw_outcomes(name, found[name], Canvas(scale))
            figure.figure.suptitle("")
            made.append(drawing(name, f"Figure: {title_of(name, scale)}", figure.says, figure.figure))
    return tuple(made)


FIGURES = (
    "figure-effective-step", "figure-single-worker", "figure-weight-decay", "figure-momentum-tuning",
)
"""Figures that need only the store. Others repeat the overview or the tables' curves, or need the data sets."""

FIGURE_TABLES = {name: TRAINED[name].table for name in FIGURES}
"""The cells of these figures."""

ENOUGH = 1 / 4
"""Fraction of a figure's cells that must have been run for the figure to be included."""
