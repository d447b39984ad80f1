"""The paper's figures of training runs: the cells of each, its drawing function, and its files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quasiglobal.algorithms import name_of, with_option
from quasiglobal.common.files import write_csv
from quasiglobal.data.partition import class_counts, split
from quasiglobal.data.sources import raw
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.paper.outcomes import Outcome, outcomes
from quasiglobal.reproduction.paper.tables import (
    CIFAR10,
    DSGDM_N,
    QG_DSGDM_N,
    SPECS,
    TABLES,
    ColumnLabel,
    PaperCell,
    PaperTable,
    RowLabel,
    Scale,
    Settings,
    by_alpha,
)
from quasiglobal.runs import plots
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.plots import BLACK, COLOURS, GREY, draw_curve, draw_dots, log_scale, panels
from quasiglobal.runs.store import RunStore
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import SCORE, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Reproduced:
    """A figure with its numbers and a summary in a sentence."""

    figure: Figure
    rows: list[dict[str, object]]
    says: str


def write_figure(made: Reproduced, name: str, folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG, and its numbers as CSV."""
    paths = plots.save(made.figure, folder, name)
    write_csv(folder / f"{name}.csv", made.rows)
    return [*paths, folder / f"{name}.csv"]


@dataclass(frozen=True)
class TrainingFigure:
    """A figure: its cells, as a table, and its drawing function."""

    table: PaperTable
    draw: Callable[[Sequence[Outcome], Scale, Path | None], Reproduced]


def draw_from_store(name: str, store: RunStore, scale: Scale = "paper", data_dir: Path | None = None) -> Reproduced:
    """Draw a figure from the runs in a store; cells without runs are left out and counted."""
    if name not in TRAINED:
        raise unknown("figure", name, TRAINED)
    found = outcomes(TRAINED[name].table, store, scale)
    if found and not any(one.runs for one in found):
        command = f"qg reproduce {name}" + ("" if scale == "paper" else f" --scale {scale}")
        raise InputError(f"{store.root} has no run of {name} at {scale} scale; `{command}` runs them")
    return draw_outcomes(name, found, scale, data_dir)


def draw_outcomes(name: str, found: Sequence[Outcome], scale: Scale, data_dir: Path | None = None) -> Reproduced:
    """Draw a figure from the outcomes of its cells."""
    title = title_of(name, scale)
    with plots.style():
        made = TRAINED[name].draw(found, scale, data_dir)
        made.figure.suptitle("\n".join(wrap(title, int(12 * made.figure.get_figwidth()))), fontsize=10)
    lacking = sum(not one.runs for one in found)
    missing = f" {lacking} of {len(found)} cells were not run." if lacking else ""
    return Reproduced(made.figure, made.rows, f"{made.says}{missing}")


def title_of(name: str, scale: Scale) -> str:
    """A figure's title, with the changes to the paper's experiments at this scale."""
    table = TRAINED[name].table
    if table.cells:
        return table.title_at(scale)
    return table.title + (" (SMOKE: digits in place of the data)" if scale == "smoke" else "")


# ---------------------------------------------------------------------------------------------- drawing

WEIGHT_DECAY, NO_WEIGHT_DECAY = "weight decay", "none"
"""Settings of the columns of *weight-decay*."""

Lines = Mapping[ColumnLabel, tuple[str, str]]
"""Columns of a panel, each with its line style and label suffix."""


def draw_loss_and_accuracy(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
    """Training loss and test accuracy of a single worker with and without weight decay: a row of panels per norm."""
    run = run_columns(found)
    norms = [norm for norm in ("BN", "GN") if norm in {column.group or column.setting for column in run}]
    figure, axes = panels(len(norms), 2, 4.6, 2.9)
    for k, norm in enumerate(norms):
        lines = {
            ColumnLabel(norm): ("-", ""),
            ColumnLabel(WEIGHT_DECAY, norm): ("-", ""),
            ColumnLabel(NO_WEIGHT_DECAY, norm): ("--", ", no weight decay"),
        }
        loss, accuracy = axes[2 * k : 2 * k + 2]
        _curves(loss, found, lines, "loss")
        _curves(accuracy, found, lines, SCORE, 100)
        loss.set(ylabel="training loss")
        log_scale(loss)
        accuracy.set(ylabel="test accuracy, %")
        for panel in (loss, accuracy):
            panel.set(xlabel="epoch" if k == len(norms) - 1 else "")
            panel.set_title(norm)
        if accuracy.lines:
            accuracy.legend(loc="lower right")
    return Reproduced(figure, _curve_rows(found), scores_in_words(found))


def draw_effective_step(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
    """Weight norm and effective step of a single worker."""
    every = [ColumnLabel(setting, norm) for setting in (WEIGHT_DECAY, NO_WEIGHT_DECAY) for norm in ("BN", "GN")]
    columns = [column for column in every if column in run_columns(found)]
    figure, axes = panels(2, len(columns), 2.9, 2.7)
    for k, column in enumerate(columns):
        norm, step = axes[k], axes[k + len(columns)]
        _curves(norm, found, {column: ("-", "")}, "weight_norm")
        _curves(step, found, {column: ("-", "")}, "effective_step")
        norm.set_title(f"{column.group}, {'weight decay' if column.setting == WEIGHT_DECAY else 'no weight decay'}")
        step.set(xlabel="epoch")
        log_scale(step)
    axes[0].set_ylabel("weight norm ‖x‖")
    axes[len(columns)].set_ylabel("effective step η/‖x‖²")
    first_legend(axes)
    return Reproduced(figure, _curve_rows(found), ends_in_words(found, "weight_norm", "Final weight norms"))


def draw_learning_curves(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
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
        {
            "row": str(one.cell.row), "column": str(one.cell.column), "seed": run.experiment.seed,
            "epoch": record["epoch"], **{name: number(record, name) for name in COLUMNS},
        }
        for one in found
        for run in one.runs
        for record in run.records()
    ]


def draw_ring_scales(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
    """Scores of the methods on rings of 16, 32 and 48 nodes."""
    figure, axes = panels(1, 2, 4.2, 3.2)
    for panel, alpha in zip(axes, (1, 0.1), strict=True):
        sizes = {str(n): ColumnLabel(f"α = {alpha:g}", f"ring {n}") for n in (16, 32, 48)}
        alike = {str(n): ColumnLabel("iid", f"ring {n}") for n in (16, 32, 48)}
        _scores(panel, found, {"SGDm-N (centralized)": alike, "DSGDm-N": sizes, "QG-DSGDm-N": sizes}, scale)
        panel.set(xlabel="nodes on the ring", ylabel="test accuracy, %")
        panel.set_title(f"α = {alpha:g}")
    handles, labels = most_entries(axes).get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), title=_legend_title(scale))
    return Reproduced(figure, score_rows(found), scores_in_words(found))


BETAS = (0.5, 0.7, 0.9, 0.95, 0.99)
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""The paper does not print its grid. Ours has the paper's β = 0.9 and untuned learning rate 0.8 inside."""

QUASI_GLOBAL = RowLabel("QG-DSGDm-N")


def local_momentum(beta: float, rate: float) -> RowLabel:
    """The row of DSGDm-N with this momentum factor and learning rate."""
    return RowLabel(f"DSGDm-N, β = {beta:g}, lr = {rate:g}")


def draw_momentum_tuning(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
    """Heat maps of the lead of QG-DSGDm-N over DSGDm-N with other momentum factors."""
    alphas = (1, 0.1)
    figure, axes = panels(1, len(alphas), 4.6, 3.4)
    rows: list[dict[str, object]] = []
    words, crosses = [], False
    for panel, alpha in zip(axes, alphas, strict=True):
        column = ColumnLabel(f"α = {alpha:g}", "ring 16")
        here = {one.cell.row: one for one in found if one.cell.column == column}
        quasi = here[QUASI_GLOBAL]
        gaps = np.array([[_gap(quasi, here[local_momentum(beta, rate)]) for rate in RATES] for beta in BETAS])
        panel.set(xlabel="learning rate of DSGDm-N", ylabel="momentum factor β of DSGDm-N")
        panel.set_title(f"α = {alpha:g}")
        for (i, j), gap in np.ndenumerate(gaps):
            rows.append({"alpha": alpha, "beta": BETAS[i], "lr": RATES[j], "gap": gap})
        crosses |= bool(np.isinf(gaps).any())
        if np.isnan(gaps).all():
            say(panel, "QG-DSGDm-N diverged" if quasi.diverged else "not run")
            words.append(f"α = {alpha:g}: QG-DSGDm-N {'diverged' if quasi.diverged else 'or DSGDm-N was not run'}")
            continue
        image = plots.draw_heat_map(panel, gaps, BETAS, RATES, "cividis_r")
        figure.colorbar(image, ax=panel, label="lead of QG-DSGDm-N, points")
        if not np.isfinite(gaps).any():
            words.append(f"α = {alpha:g}: every DSGDm-N that was run diverged")
            continue
        i, j = np.unravel_index(np.nanargmin(gaps), gaps.shape)
        plots.frame_cell(panel, int(i), int(j))
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


def _scores(
    panel: Axes, found: Sequence[Outcome], methods: Mapping[str, Mapping[str, ColumnLabel]], scale: Scale
) -> None:
    """Plot scores of methods over labelled columns: ours filled, the paper's hollow and dotted."""
    by_label = {one.cell.label: one for one in found}
    for k, (method, columns) in enumerate(methods.items()):
        here = [by_label[RowLabel(method), column] for column in columns.values()]
        shift = 0.06 * (k - (len(methods) - 1) / 2)
        ours = {at + shift: score for at, one in enumerate(here) if (score := one.ours())}
        _points(panel, ours, colour_of(here[0]), "o-", method)
        if scale == "paper":
            papers = {at + shift: one.cell.score for at, one in enumerate(here) if one.cell.score}
            _points(panel, papers, colour_of(here[0]), "o:")
    ticks = list(next(iter(methods.values())))
    panel.set_xticks(range(len(ticks)), ticks)
    panel.set_xlim(-0.3, len(ticks) - 0.7)
    if not panel.lines:
        shown = {column for columns in methods.values() for column in columns.values()}
        ran = any(one.runs for one in found if one.cell.row.method in methods and one.cell.column in shown)
        say(panel, "diverged" if ran else "not run")


def _points(panel: Axes, scores: Mapping[float, Score], colour: str, form: str, label: str | None = None) -> None:
    if scores:
        means, stds = [score.mean for score in scores.values()], [score.std or 0 for score in scores.values()]
        panel.errorbar(
            list(scores), means, stds, fmt=form, color=colour, markerfacecolor="white" if form == "o:" else colour,
            markersize=4.5, linewidth=1.2, capsize=2, label=label,
        )


def _legend_title(scale: Scale) -> str | None:
    """Explanation of the paper's markers, which are drawn at the paper's scale alone."""
    return "hollow: the paper" if scale == "paper" else None


PARTITIONS: list[tuple[str, str, int, float]] = [
    (title, name, n, alpha)
    for title, name, n, alphas in (
        ("CIFAR-10", "cifar10", 16, (10, 1, 0.1)), ("CIFAR-10", "cifar10", 32, (1, 0.1)),
        ("CIFAR-10", "cifar10", 48, (1, 0.1)), ("ImageNet-32", "imagenet32", 16, (1, 0.1)),
        ("AG News", "agnews", 16, (10, 1, 0.1)), ("SST-2", "sst2", 16, (10, 1, 0.1)),
    )
    for alpha in alphas
]
"""The paper's partitions: title, data, nodes and α."""


def examples_by_class(data: str, nodes: int, alpha: float, data_dir: Path | None) -> NDArray[np.int64]:
    """Number of examples by node and class in the partition of seed 0."""
    found = raw(data, data_dir)
    labels = found.train.y.numpy()
    parts = split(labels, nodes, "dirichlet", alpha, 0, found.train.columns)
    return class_counts(parts, labels, len(found.classes))


def draw_partition(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
    """The paper's partitions of the data sets that are installed."""
    wanted = PARTITIONS if scale != "smoke" else [
        ("digits", "digits", n, alpha) for _, name, n, alpha in PARTITIONS if name == "cifar10"
    ]
    counts, lost = {}, {}
    for title, data, nodes, alpha in wanted:
        try:
            counts[title, nodes, alpha] = examples_by_class(data, nodes, alpha, data_dir)
        except InputError as error:
            lost[title] = str(error)
    if not counts:
        raise InputError("; ".join(lost.values()))
    settings, alphas = list(dict.fromkeys(key[:2] for key in counts)), sorted({key[2] for key in counts}, reverse=True)
    figure, axes = panels(len(settings), len(alphas), 3.6, 2.9)
    places = itertools.product(settings, alphas)
    for panel, ((title, nodes), alpha) in zip(axes, places, strict=True):
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


def draw_motivation(found: Sequence[Outcome], scale: Scale, data_dir: Path | None) -> Reproduced:
    """Figure 1: partitions of three degrees of heterogeneity, and the scores of the methods on them."""
    figure, axes = panels(2, 3, 3.4, 2.8)
    data = found[0].experiment.data
    for panel, alpha in zip(axes, (10, 1, 0.1), strict=False):
        panel.set_title(f"{data}, n = 16, α = {alpha:g}")
        try:
            draw_dots(panel, examples_by_class(data, 16, alpha, data_dir))
        except InputError:
            say(panel, f"{data} is not installed")
    for panel, graph in zip(axes[3:], ("ring 16", "social 32"), strict=False):
        columns = {f"{alpha:g}": ColumnLabel(f"α = {alpha:g}", graph) for alpha in (10, 1, 0.1)}
        _scores(panel, found, dict.fromkeys(("DSGD", "DSGDm-N", "QG-DSGDm-N"), columns), scale)
        panel.set(xlabel="α", ylabel="test accuracy, %")
        panel.set_title(graph)
    axes[5].set_axis_off()
    handles, labels = most_entries(axes[3:5]).get_legend_handles_labels()
    if handles:
        axes[5].legend(handles, labels, loc="center left", title=_legend_title(scale))
    return Reproduced(figure, score_rows(found), scores_in_words(found))


# ------------------------------------------------------------------------------------------ shared


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


def most_entries(axes: Sequence[Axes]) -> Axes:
    """The first of the panels with the most labelled curves."""
    return max(axes, key=lambda panel: len(panel.get_legend_handles_labels()[1]))


def first_legend(axes: Sequence[Axes]) -> None:
    """Put a legend into the first of the panels with the most curves."""
    if (fullest := most_entries(axes)).get_legend_handles_labels()[1]:
        fullest.legend()


def score_rows(found: Sequence[Outcome]) -> list[dict[str, object]]:
    """One row per cell: our score after the last epoch and of the best, and the paper's."""
    rows: list[dict[str, object]] = []
    for one in found:
        row: dict[str, object] = {"row": str(one.cell.row), "column": str(one.cell.column)}
        row |= {"lr": one.experiment.lr, "seeds": len(one.runs)}
        for whose, score in (("ours", one.ours()), ("best", one.ours("best")), ("paper", one.cell.score)):
            row |= {whose: score and score.mean, f"{whose}_std": score and score.std}
        rows.append(row)
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


# ---------------------------------------------------------------------------------------------- cells


def _cells(
    base: Settings, rows: Mapping[RowLabel, Settings], columns: Mapping[str, Settings]
) -> tuple[PaperCell, ...]:
    """Cells without a published number."""
    return tuple(
        PaperCell(row, ColumnLabel.parse(column), Experiment(**{**base, **place, **settings}), None)
        for row, settings in rows.items()
        for column, place in columns.items()
    )


EFFECTIVE_STEP = _cells(
    SPECS["weight-decay"].base,
    {RowLabel("SGDm"): {"algorithm": "sgdm"}, RowLabel("QG-SGDm"): {"algorithm": "qg-sgdm"}},
    SPECS["weight-decay"].columns,
)

LEARNING_CURVES = (
    *sorted(TABLES["motivation"].cells, key=lambda cell: cell.column.group == "ring 16"),
    *(
        PaperCell(cell.row, ColumnLabel(cell.column.setting, "ImageNet, ring 16"), cell.experiment, cell.score)
        for cell in TABLES["imagenet"].cells
        if cell.row.model == "ImageNet, ResNet-18 EvoNorm" and cell.column.setting != "iid" and not cell.text
    ),
)

MOMENTUM_TUNING = _cells(
    {**CIFAR10, "topology": "ring:16"},
    {QUASI_GLOBAL: QG_DSGDM_N}
    | {
        local_momentum(beta, rate): {"algorithm": with_option(DSGDM_N["algorithm"], "beta", beta), "lr": rate}
        for beta in BETAS
        for rate in RATES
    },
    by_alpha("ring:16", 1, 0.1, prefix="ring 16, "),
)


def _of_table(table: str) -> tuple[str, str, Sequence[PaperCell]]:
    """Name, title and cells of the figure of a table, without the rows "as in the text"."""
    return f"figure-{table}", TABLES[table].title, [cell for cell in TABLES[table].cells if not cell.text]


TRAINED: dict[str, TrainingFigure] = {
    name: TrainingFigure(PaperTable(name, title, tuple(cells)), draw)
    for name, title, cells, draw in (
        (*_of_table("motivation"), draw_motivation),
        ("figure-partition", "Examples per class and node, by dot size", (), draw_partition),
        (
            "figure-effective-step", "A single worker's weight norm and effective step: ResNet-20 on CIFAR-10",
            EFFECTIVE_STEP, draw_effective_step,
        ),
        (*_of_table("single-worker"), draw_loss_and_accuracy),
        (*_of_table("weight-decay"), draw_loss_and_accuracy),
        ("figure-curves", "Learning curves: CIFAR-10 and ImageNet", LEARNING_CURVES, draw_learning_curves),
        (
            "figure-momentum-tuning",
            "Tuning DSGDm-N's momentum factor, against QG-DSGDm-N with β = 0.9: ResNet-EvoNorm-20 on CIFAR-10",
            MOMENTUM_TUNING, draw_momentum_tuning,
        ),
        (*_of_table("ring-scales"), draw_ring_scales),
    )
}
"""The figures of training runs by name."""
