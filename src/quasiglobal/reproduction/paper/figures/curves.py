"""Figures of curves over the epochs: losses, accuracies, weight norms and effective steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quasiglobal.reproduction.paper.figures.canvas import (
    Canvas,
    colour_of,
    ends_in_words,
    first_legend,
    run_columns,
    say,
    scores_in_words,
)
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.published import ColumnLabel
from quasiglobal.runs.plots import draw_curve, log_scale, panels
from quasiglobal.training.metrics import SCORE, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WEIGHT_DECAY, NO_WEIGHT_DECAY = "weight decay", "none"
"""Settings of the columns of *weight-decay*."""

Lines = Mapping[ColumnLabel, tuple[str, str]]
"""Columns of a panel, each with its line style and label suffix."""


def draw_single_worker(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Loss and accuracy of a single worker, by norm."""
    return _loss_and_accuracy(found, {norm: {ColumnLabel(norm): ("-", "")} for norm in ("BN", "GN")})


def draw_weight_decay(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Loss and accuracy of a single worker with and without weight decay, by norm."""
    return _loss_and_accuracy(found, {
        norm: {
            ColumnLabel(WEIGHT_DECAY, norm): ("-", ""),
            ColumnLabel(NO_WEIGHT_DECAY, norm): ("--", ", no weight decay"),
        }
        for norm in ("BN", "GN")
    })


def _loss_and_accuracy(found: Sequence[Outcome], columns: Mapping[str, Lines]) -> Reproduced:
    """A row of panels for each title: the training loss and the test accuracy of its columns."""
    run = run_columns(found)
    columns = {title: lines for title, lines in columns.items() if any(column in run for column in lines)}
    figure, axes = panels(len(columns), 2, 4.6, 2.9)
    for k, (title, lines) in enumerate(columns.items()):
        loss, accuracy = axes[2 * k : 2 * k + 2]
        _curves(loss, found, lines, "loss")
        _curves(accuracy, found, lines, SCORE, 100)
        loss.set(ylabel="training loss")
        log_scale(loss)
        accuracy.set(ylabel="test accuracy, %")
        for panel in (loss, accuracy):
            panel.set(xlabel="epoch" if k == len(columns) - 1 else "")
            panel.set_title(title)
        if accuracy.lines:
            accuracy.legend(loc="lower right")
    return Reproduced(figure, _curve_rows(found), scores_in_words(found))


def draw_effective_step(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Weight norm and effective step of a single worker."""
    columns = {
        ColumnLabel(setting, norm): f"{norm}, {title}"
        for setting, title in ((WEIGHT_DECAY, "weight decay"), (NO_WEIGHT_DECAY, "no weight decay"))
        for norm in ("BN", "GN")
        if ColumnLabel(setting, norm) in run_columns(found)
    }
    figure, axes = panels(2, len(columns), 2.9, 2.7)
    for k, (column, title) in enumerate(columns.items()):
        norm, step = axes[k], axes[k + len(columns)]
        _curves(norm, found, {column: ("-", "")}, "weight_norm")
        _curves(step, found, {column: ("-", "")}, "effective_step")
        norm.set_title(title)
        step.set(xlabel="epoch")
        log_scale(step)
    axes[0].set_ylabel("weight norm ‖x‖")
    axes[len(columns)].set_ylabel("effective step η/‖x‖²")
    first_legend(axes)
    return Reproduced(figure, _curve_rows(found), ends_in_words(found, "weight_norm", "Final weight norms"))


def draw_learning_curves(found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Test accuracy over the epochs, one panel per column."""
    columns = run_columns(found)
    figure, axes = panels(math.ceil(len(columns) / 3), min(3, len(columns)), 3.5, 2.6)
    for panel, column in zip(axes, columns, strict=False):
        _curves(panel, found, {column: ("-", "")}, SCORE, 100)
        panel.set_title(str(column))
        panel.set(xlabel="epoch")
    for panel in axes[len(columns):]:
        panel.set_visible(False)
    for panel in axes[::3]:
        panel.set_ylabel("test accuracy, %")
    first_legend(axes)
    return Reproduced(figure, _curve_rows(found), scores_in_words(found))


def _curves(panel: Axes, found: Sequence[Outcome], lines: Lines, metric: str, factor: float = 1) -> None:
    """Plot a metric over the epochs, one curve per method: mean over the seeds, with a band of their range."""
    for one in found:
        if one.cell.column in lines and one.runs:
            line, suffix = lines[one.cell.column]
            records = [run.records() for run in one.runs]
            label = one.cell.row.method + suffix
            draw_curve(panel, records, metric, colour=colour_of(one), label=label, factor=factor, line=line)
    panel.locator_params(axis="x", nbins=5, integer=True)
    if not any(np.size(line.get_xdata()) for line in panel.lines):
        say(panel, "diverged" if panel.lines else "not run")


COLUMNS = ("lr", "loss", "train_accuracy", SCORE, "weight_norm", "effective_step")


def _curve_rows(found: Sequence[Outcome]) -> list[dict[str, object]]:
    return [
        {"row": str(one.cell.row), "column": str(one.cell.column), "seed": run.experiment.seed}
        | {"epoch": record["epoch"]}
        | {name: number(record, name) for name in COLUMNS}
        for one in found
        for run in one.runs
        for record in run.records()
    ]
