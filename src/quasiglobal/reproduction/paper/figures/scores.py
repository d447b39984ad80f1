"""Figures of scores: over the size of the ring, and over the momentum factor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quasiglobal.reproduction.paper.figures.canvas import (
    Canvas,
    by_label,
    colour_of,
    legend_entries,
    say,
    score_rows,
    scores_in_words,
)
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.published import CellLabel, ColumnLabel, RowLabel
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.plots import draw_heat_map, frame_cell, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_ring_scales(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Scores of the methods on rings of 16, 32 and 48 nodes."""
    figure, axes = panels(1, 2, 4.2, 3.2)
    outcomes = by_label(found)
    for panel, alpha in zip(axes, (1, 0.1), strict=True):
        sizes = {str(n): ColumnLabel(f"α = {alpha:g}", f"ring {n}") for n in (16, 32, 48)}
        alike = {str(n): ColumnLabel("iid", f"ring {n}") for n in (16, 32, 48)}
        draw_scores(panel, outcomes, {"SGDm-N (centralized)": alike, "DSGDm-N": sizes, "QG-DSGDm-N": sizes}, canvas)
        panel.set(xlabel="nodes on the ring", ylabel="test accuracy, %")
        panel.set_title(f"α = {alpha:g}")
    handles, labels = legend_entries(axes)
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), title=canvas.legend_title)
    return Reproduced(figure, score_rows(found), scores_in_words(found))


BETAS = (0.5, 0.7, 0.9, 0.95, 0.99)
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""The paper does not print its grid. Ours has the paper's β = 0.9 and untuned learning rate 0.8 inside."""

QUASI_GLOBAL = RowLabel("QG-DSGDm-N")


def local_momentum(beta: float, rate: float) -> RowLabel:
    """The row of DSGDm-N with this momentum factor and learning rate."""
    return RowLabel(f"DSGDm-N, β = {beta:g}, lr = {rate:g}")


def draw_momentum_tuning(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Heat maps of how far DSGDm-N with other momentum factors is behind QG-DSGDm-N."""
    alphas = (1, 0.1)
    figure, axes = panels(1, len(alphas), 4.6, 3.4)
    outcomes = by_label(found)
    rows: list[dict[str, object]] = []
    words, crosses = [], False
    for panel, alpha in zip(axes, alphas, strict=True):
        column = ColumnLabel(f"α = {alpha:g}", "ring 16")
        quasi = outcomes[QUASI_GLOBAL, column]
        gaps = np.array([
            [_gap(quasi, outcomes[local_momentum(beta, rate), column]) for rate in RATES] for beta in BETAS
        ])
        panel.set(xlabel="learning rate of DSGDm-N", ylabel="momentum factor β of DSGDm-N")
        panel.set_title(f"α = {alpha:g}")
        for (i, j), gap in np.ndenumerate(gaps):
            rows.append({"alpha": alpha, "beta": BETAS[i], "lr": RATES[j], "gap": gap})
        crosses |= bool(np.isinf(gaps).any())
        if np.isnan(gaps).all():
            say(panel, "QG-DSGDm-N diverged" if quasi.diverged else "not run")
            words.append(f"α = {alpha:g}: QG-DSGDm-N {'diverged' if quasi.diverged else 'or DSGDm-N was not run'}")
            continue
        image = draw_heat_map(panel, gaps, BETAS, RATES, "cividis_r")
        figure.colorbar(image, ax=panel, label="lead of QG-DSGDm-N, points")
        if not np.isfinite(gaps).any():
            words.append(f"α = {alpha:g}: every DSGDm-N that was run diverged")
            continue
        i, j = np.unravel_index(np.nanargmin(gaps), gaps.shape)
        frame_cell(panel, int(i), int(j))
        words.append(
            f"α = {alpha:g}: the best DSGDm-N, β = {BETAS[i]:g} and lr = {RATES[j]:g}, is "
            f"{abs(gaps[i, j]):.2f} points {'behind' if gaps[i, j] >= 0 else 'ahead of'} QG-DSGDm-N"
        )
    return Reproduced(figure, rows, "; ".join(words) + "." + " A cross: it diverged." * crosses)


def _gap(quasi: Outcome, local: Outcome) -> float:
    """Lead of quasi-global over local momentum; infinite if local diverged, NaN without a run or a reference score."""
    ours, theirs = local.ours(), quasi.ours()
    if theirs is None or not local.runs:
        return math.nan
    return math.inf if ours is None else theirs.mean - ours.mean


def draw_scores(
    panel: Axes,
    outcomes: Mapping[CellLabel, Outcome],
    methods: Mapping[str, Mapping[str, ColumnLabel]],
    canvas: Canvas,
) -> None:
    """Plot scores of methods over labelled columns: ours filled, the paper's hollow and dotted."""
    ticks = list(next(iter(methods.values())))
    here = {
        method: [outcomes[RowLabel(method), column] for column in columns.values()]
        for method, columns in methods.items()
    }
    for k, (method, found) in enumerate(here.items()):
        shift = 0.06 * (k - (len(methods) - 1) / 2)
        ours = {at + shift: score for at, one in enumerate(found) if (score := one.ours())}
        _points(panel, ours, colour_of(found[0]), method, "o-")
        if canvas.beside_paper:
            papers = {at + shift: one.cell.score for at, one in enumerate(found) if one.cell.score}
            _points(panel, papers, colour_of(found[0]), None, "o:")
    panel.set_xticks(range(len(ticks)), ticks)
    panel.set_xlim(-0.3, len(ticks) - 0.7)
    if not panel.lines:
        ran = any(one.runs for found in here.values() for one in found)
        say(panel, "diverged" if ran else "not run")


def _points(panel: Axes, scores: Mapping[float, Score], colour: str, label: str | None, form: str) -> None:
    if scores:
        means, stds = [score.mean for score in scores.values()], [score.std or 0 for score in scores.values()]
        face = "white" if form == "o:" else colour
        panel.errorbar(
            list(scores), means, stds, fmt=form, color=colour, markerfacecolor=face, markersize=4.5, linewidth=1.2,
            capsize=2, label=label,
        )
