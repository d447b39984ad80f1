"""A finished figure and its files, and helpers of the training figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quasiglobal.algorithms import name_of
from quasiglobal.common.files import write_csv
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.tables import CellLabel, ColumnLabel, Scale
from quasiglobal.runs.plots import BLACK, COLOURS, GREY, save
from quasiglobal.training.metrics import number

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Reproduced:
    """A figure, the numbers in it, and a sentence on what it shows."""

    figure: Figure
    rows: list[dict[str, object]]
    says: str


def write_figure(made: Reproduced, name: str, folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG, and its numbers as CSV."""
    paths = save(made.figure, folder, name)
    write_csv(folder / f"{name}.csv", made.rows)
    return [*paths, folder / f"{name}.csv"]


@dataclass(frozen=True)
class Canvas:
    """Scale of a figure, and the folder of the data sets that it shows."""

    scale: Scale
    data_dir: Path | None = None

    @property
    def beside_paper(self) -> bool:
        """Whether to draw the paper's numbers beside ours."""
        return self.scale == "paper"

    @property
    def legend_title(self) -> str | None:
        """Legend title that explains the paper's markers; None if they are not drawn."""
        return "hollow: the paper" if self.beside_paper else None


def by_label(found: Sequence[Outcome]) -> dict[CellLabel, Outcome]:
    """Outcomes by row and column label."""
    return {one.cell.label: one for one in found}


def colour_of(one: Outcome) -> str:
    """The colour of the outcome's algorithm."""
    return COLOURS.get(name_of(one.experiment.algorithm), BLACK)


def say(panel: Axes, words: str) -> None:
    """Write a text in place of missing curves and axes."""
    panel.set_axis_off()
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", va="center", color=GREY)


def run_columns(found: Sequence[Outcome]) -> list[ColumnLabel]:
    """The columns that have runs; all columns if none has, so that a figure has panels."""
    some = [one for one in found if one.runs] or found
    return list(dict.fromkeys(one.cell.column for one in some))


def first_legend(axes: Sequence[Axes]) -> None:
    """Put a legend into the first of the panels with the most curves."""
    fullest = max(axes, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    if fullest.get_legend_handles_labels()[1]:
        fullest.legend()


def legend_entries(axes: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """Handles and labels of the panel with the most entries."""
    return max((panel.get_legend_handles_labels() for panel in axes), key=lambda entries: len(entries[1]))


def score_rows(found: Sequence[Outcome]) -> list[dict[str, object]]:
    """One row per cell: our score after the last epoch and of the best, and the paper's."""
    rows: list[dict[str, object]] = []
    for one in found:
        values: dict[str, object] = {"row": str(one.cell.row), "column": str(one.cell.column)}
        values |= {"lr": one.experiment.lr, "seeds": len(one.runs)}
        for whose, score in (("ours", one.ours()), ("best", one.ours("best")), ("paper", one.cell.score)):
            values |= {whose: score.mean if score else None, f"{whose}_std": score.std if score else None}
        rows.append(values)
    return rows


def scores_in_words(found: Sequence[Outcome]) -> str:
    """Every method's score in each column as text, best first, diverged methods last."""
    words = []
    for column in dict.fromkeys(one.cell.column for one in found):
        here = [one for one in found if one.cell.column == column]
        scores = {one.cell.row.method: score for one in here if (score := one.ours())}
        ranked = sorted(scores.items(), key=lambda entry: -entry[1].mean)
        said = [f"{method} {score}" for method, score in ranked]
        said += [f"{one.cell.row.method} diverged" for one in here if one.diverged]
        if said:
            words.append(f"{column}: " + ", ".join(said))
    return "; ".join(words) + "."


def ends_in_words(found: Sequence[Outcome], metric: str, what: str) -> str:
    """A metric of each cell in its last test as text: the mean over seeds, or diverged if a seed did."""
    words = []
    for one in found:
        lasts = (run.summary.last for run in one.runs if run.summary)
        ends = [end for last in lasts if (end := number(last, metric)) is not None]
        if one.diverged or ends:
            reached = "diverged" if one.diverged else f"{sum(ends) / len(ends):.4g}"
            words.append(f"{one.cell.row}, {one.cell.column}: {reached}")
    return f"{what}: " + "; ".join(words) + "."
