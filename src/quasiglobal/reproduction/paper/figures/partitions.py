"""Figures of data partitions: dots by node and class, alone and beside scores (Figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quasiglobal.data.partition import class_counts, split
from quasiglobal.data.sources import raw
from quasiglobal.errors import InputError
from quasiglobal.reproduction.paper.figures.canvas import (
    Canvas,
    by_label,
    legend_entries,
    say,
    score_rows,
    scores_in_words,
)
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.reproduction.paper.figures.scores import draw_scores
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.published import ColumnLabel
from quasiglobal.runs.plots import draw_dots, panels

PARTITIONS: list[tuple[str, str, int, float]] = [
    *(("CIFAR-10", "cifar10", n, alpha) for n, alphas in ((16, (10, 1, 0.1)), (32, (1, 0.1)), (48, (1, 0.1)))
      for alpha in alphas),
    *(("ImageNet-32", "imagenet32", 16, alpha) for alpha in (1, 0.1)),
    *((title, name, 16, alpha) for title, name in (("AG News", "agnews"), ("SST-2", "sst2"))
      for alpha in (10, 1, 0.1)),
]
"""The paper's partitions: title, data, nodes and α."""


def who_holds_what(data: str, nodes: int, alpha: float, data_dir: Path | None) -> NDArray[np.int64]:
    """Number of examples by node and class in the partition of seed 0."""
    found = raw(data, data_dir)
    labels = found.train.y.numpy()
    parts = split(labels, nodes, "dirichlet", alpha, 0, found.train.columns)
    return class_counts(parts, labels, len(found.classes))


def draw_partition(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """The paper's partitions of the data sets that are installed."""
    wanted = PARTITIONS if canvas.scale != "smoke" else [
        ("digits", "digits", n, alpha) for _, name, n, alpha in PARTITIONS if name == "cifar10"
    ]
    counts, lost = {}, {}
    for title, data, nodes, alpha in wanted:
        try:
            counts[title, nodes, alpha] = who_holds_what(data, nodes, alpha, canvas.data_dir)
        except InputError as error:
            lost[title] = str(error)
    if not counts:
        raise InputError("; ".join(lost.values()))
    settings, alphas = list(dict.fromkeys(key[:2] for key in counts)), sorted({key[2] for key in counts}, reverse=True)
    figure, axes = panels(len(settings), len(alphas), 3.6, 2.9)
    places = ((*setting, alpha) for setting in settings for alpha in alphas)
    for panel, (title, nodes, alpha) in zip(axes, places, strict=True):
        if (title, nodes, alpha) in counts:
            draw_dots(panel, counts[title, nodes, alpha])
            panel.set_title(f"{title}, n = {nodes}, α = {alpha:g}")
        else:
            panel.set_axis_off()
    rows: list[dict[str, object]] = [
        {"data": title, "n": nodes, "alpha": alpha, "node": i, "class": j, "examples": int(count)}
        for (title, nodes, alpha), table in counts.items()
        for (i, j), count in np.ndenumerate(table)
    ]
    shares = "; ".join(
        f"{title}, n = {nodes}, α = {alpha:g}: {np.count_nonzero(table, axis=1).mean():.1f}"
        for (title, nodes, alpha), table in counts.items()
    )
    missing = f" Not drawn, because the data is not installed: {', '.join(lost)}." if lost else ""
    return Reproduced(figure, rows, f"Mean number of classes per node: {shares}.{missing}")


def draw_motivation(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Figure 1: partitions of three degrees of heterogeneity, and the scores of the methods on them."""
    figure, axes = panels(2, 3, 3.4, 2.8)
    data = found[0].experiment.data
    for panel, alpha in zip(axes, (10, 1, 0.1), strict=False):
        panel.set_title(f"{data}, n = 16, α = {alpha:g}")
        try:
            draw_dots(panel, who_holds_what(data, 16, alpha, canvas.data_dir))
        except InputError:
            say(panel, f"{data} is not installed")
    outcomes = by_label(found)
    for panel, graph in zip(axes[3:], ("ring 16", "social 32"), strict=False):
        columns = {f"{alpha:g}": ColumnLabel(f"α = {alpha:g}", graph) for alpha in (10, 1, 0.1)}
        draw_scores(panel, outcomes, {"DSGD": columns, "DSGDm-N": columns, "QG-DSGDm-N": columns}, canvas)
        panel.set(xlabel="α", ylabel="test accuracy, %")
        panel.set_title(graph)
    axes[5].set_axis_off()
    handles, labels = legend_entries(axes[3:5])
    if handles:
        axes[5].legend(handles, labels, loc="center left", title=canvas.legend_title)
    return Reproduced(figure, score_rows(found), scores_in_words(found))
