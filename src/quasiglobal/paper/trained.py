"""The paper's figures that show training runs: the cells each needs, and how it is drawn of what the store has.

A figure's cells are those of a table of the paper where it has one, so that a run is never needed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quasiglobal.algorithms import with_option
from quasiglobal.data.partition import class_counts, split
from quasiglobal.data.sources import raw
from quasiglobal.errors import InputError, unknown
from quasiglobal.paper.figures import Reproduced
from quasiglobal.paper.published import Score
from quasiglobal.paper.reproduce import Outcome, outcomes
from quasiglobal.paper.tables import (
    ALONE,
    CIFAR10,
    DSGDM_N,
    QG_DSGDM_N,
    TABLES,
    Cell,
    Scale,
    Settings,
    Table,
    by_alpha,
)
from quasiglobal.report.plots import (
    BLACK,
    COLOURS,
    GREY,
    draw_curve,
    draw_dots,
    draw_heat_map,
    frame_cell,
    log_scale,
    panels,
    style,
)
from quasiglobal.training.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Place:
    """Where and at what scale a figure is drawn."""

    scale: Scale
    data_dir: Path | None = None

    @property
    def is_papers(self) -> bool:
        """Whether the paper's numbers may stand beside ours."""
        return self.scale == "paper"


@dataclass(frozen=True)
class Trained:
    """A figure: what is to be run for it, as a table's cells are, and its drawing."""

    table: Table
    draw: Callable[[Sequence[Outcome], Place], Reproduced]


def draw(name: str, root: Path, scale: Scale = "paper", data_dir: Path | None = None) -> Reproduced:
    """A figure of what the store under `root` has; what was not run is left out and named."""
    if name not in TRAINED:
        raise unknown("figure", name, TRAINED)
    table = TRAINED[name].table
    found = outcomes(table, root, scale)
    if found and not any(one.runs for one in found):
        raise InputError(f"{root} has no run of {name} at {scale} scale; `qg reproduce {name}` runs them")
    return drawn(name, found, Place(scale, data_dir))


def drawn(name: str, found: Sequence[Outcome], place: Place) -> Reproduced:
    """A figure of the outcomes of its cells."""
    table, scale = TRAINED[name].table, place.scale
    with style():
        made = TRAINED[name].draw(found, place)
        title = table.title_at(scale) if found else table.title + NO_RUNS[scale]
        made.figure.suptitle("\n".join(wrap(title, int(12 * made.figure.get_figwidth()))), fontsize=10)
    lacking = sum(not one.runs for one in found)
    says = f"{made.says} {lacking} of {len(found)} cells were not run." if lacking else made.says
    return Reproduced(made.figure, made.rows, f"{title}. {says}")


NO_RUNS: dict[Scale, str] = {"smoke": " (SMOKE: digits in place of the data)", "short": "", "paper": ""}
"""What a scale changes of a figure that shows no training."""


# ------------------------------------------------------------------------------------------------ partitions

PARTITIONS: list[tuple[str, str, int, float]] = [
    *(("CIFAR-10", "cifar10", n, alpha) for n, alphas in ((16, (10, 1, 0.1)), (32, (1, 0.1)), (48, (1, 0.1)))
      for alpha in alphas),
    *(("ImageNet-32", "imagenet32", 16, alpha) for alpha in (1, 0.1)),
    *((title, name, 16, alpha) for title, name in (("AG News", "agnews"), ("SST-2", "sst2"))
      for alpha in (10, 1, 0.1)),
]
"""The paper's partitions: title, data, nodes and α."""


def who_holds_what(data: str, nodes: int, alpha: float, data_dir: Path | None) -> NDArray[np.int64]:
    """Examples by node and class in the partition of seed 0."""
    found = raw(data, data_dir)
    labels = found.train.y.numpy()
    parts = split("dirichlet", labels, nodes, alpha, 0, found.train.columns)
    return class_counts(parts, labels, len(found.classes))


def _partition(found: Sequence[Outcome], place: Place) -> Reproduced:
    wanted = PARTITIONS if place.scale != "smoke" else [
        ("digits", "digits", n, alpha) for _, name, n, alpha in PARTITIONS if name == "cifar10"
    ]
    counts, lost = {}, {}
    for title, data, nodes, alpha in wanted:
        try:
            counts[title, nodes, alpha] = who_holds_what(data, nodes, alpha, place.data_dir)
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
    missing = f" Not drawn, as the data is not here: {', '.join(lost)}." if lost else ""
    return Reproduced(figure, rows, f"Classes that a node has examples of, on average: {shares}.{missing}")


def _motivation(found: Sequence[Outcome], place: Place) -> Reproduced:
    figure, axes = panels(2, 3, 3.4, 2.8)
    data = found[0].experiment.data
    for panel, alpha in zip(axes, (10, 1, 0.1), strict=False):
        panel.set_title(f"{data}, n = 16, α = {alpha:g}")
        try:
            draw_dots(panel, who_holds_what(data, 16, alpha, place.data_dir))
        except InputError:
            _say(panel, f"{data} is not here")
    by_name = _by_name(found)
    for panel, graph in zip(axes[3:], ("ring 16", "social 32"), strict=False):
        columns = {f"{alpha:g}": f"{graph}, α = {alpha:g}" for alpha in (10, 1, 0.1)}
        _scores(panel, by_name, {"DSGD": columns, "DSGDm-N": columns, "QG-DSGDm-N": columns}, place)
        panel.set(xlabel="α", ylabel="test accuracy, %")
        panel.set_title(graph)
    axes[5].set_axis_off()
    handles, labels = _entries(axes[3:5])
    if handles:
        axes[5].legend(handles, labels, loc="center left", title=_key(place))
    return Reproduced(figure, _table_rows(found), _best_of_columns(found))


# ---------------------------------------------------------------------------------------------------- curves


def _single_worker(found: Sequence[Outcome], place: Place) -> Reproduced:
    return _loss_and_accuracy(found, {norm: {norm: "-"} for norm in ("BN", "GN")})


def _weight_decay(found: Sequence[Outcome], place: Place) -> Reproduced:
    return _loss_and_accuracy(found, {n: {f"{n}, weight decay": "-", f"{n}, none": "--"} for n in ("BN", "GN")})


def _loss_and_accuracy(found: Sequence[Outcome], columns: Mapping[str, Mapping[str, str]]) -> Reproduced:
    """A row of panels for each title: the training loss and the test accuracy of its columns, in their lines."""
    figure, axes = panels(len(columns), 2, 4.6, 2.9)
    for k, (title, lines) in enumerate(columns.items()):
        loss, accuracy = axes[2 * k : 2 * k + 2]
        _curves(loss, found, lines, "loss")
        _curves(accuracy, found, lines, "accuracy", 100)
        loss.set(ylabel="training loss")
        log_scale(loss)
        accuracy.set(ylabel="test accuracy, %")
        for panel in (loss, accuracy):
            panel.set(xlabel="epoch" if k == len(columns) - 1 else "")
            panel.set_title(title)
        if accuracy.lines:
            accuracy.legend(loc="lower right")
    return Reproduced(figure, _curve_rows(found), _best_of_columns(found))


def _effective_step(found: Sequence[Outcome], place: Place) -> Reproduced:
    columns = ("BN, weight decay", "GN, weight decay", "BN, none", "GN, none")
    figure, axes = panels(2, len(columns), 2.9, 2.7)
    for k, column in enumerate(columns):
        norm, step = axes[k], axes[k + len(columns)]
        _curves(norm, found, {column: "-"}, "weight_norm")
        _curves(step, found, {column: "-"}, "effective_step")
        norm.set_title(column.replace("none", "no weight decay"))
        step.set(xlabel="epoch")
        log_scale(step)
    axes[0].set_ylabel("weight norm ‖x‖")
    axes[len(columns)].set_ylabel("effective step η/‖x‖²")
    _first_legend(axes)
    return Reproduced(figure, _curve_rows(found), _ends(found, "weight_norm", "Weight norms in the end"))


def _eight_panels(found: Sequence[Outcome], place: Place) -> Reproduced:
    columns = list(dict.fromkeys(one.cell.column for one in found))
    figure, axes = panels(math.ceil(len(columns) / 3), 3, 3.5, 2.6)
    for panel, column in zip(axes, columns, strict=False):
        _curves(panel, found, {column: "-"}, "accuracy", 100)
        panel.set_title(column)
        panel.set(xlabel="epoch")
    for panel in axes[len(columns):]:
        panel.set_visible(False)
    for panel in axes[::3]:
        panel.set_ylabel("test accuracy, %")
    _first_legend(axes)
    return Reproduced(figure, _curve_rows(found), _best_of_columns(found))


def _curves(
    panel: Axes, found: Sequence[Outcome], lines: Mapping[str, str], measure: str, factor: float = 1
) -> None:
    """A measure over the epochs, a curve a method: its mean over the seeds, within their range."""
    for one in found:
        if one.cell.column in lines and one.runs:
            line = lines[one.cell.column]
            suffix = ", no weight decay" if line == "--" else ""
            records = [run.records for run in one.runs]
            draw_curve(
                panel, records, measure, colour=_colour(one), label=_method(one) + suffix, factor=factor, line=line
            )
    panel.locator_params(axis="x", nbins=5, integer=True)
    if not any(np.size(line.get_xdata()) for line in panel.lines):
        _say(panel, "diverged" if panel.lines else "not run")


# ---------------------------------------------------------------------------------------------------- scores


def _ring_scales(found: Sequence[Outcome], place: Place) -> Reproduced:
    figure, axes = panels(1, 2, 4.2, 3.2)
    by_name = _by_name(found)
    for panel, alpha in zip(axes, (1, 0.1), strict=True):
        sizes = {str(n): f"ring {n}, α = {alpha:g}" for n in (16, 32, 48)}
        alike = {str(n): f"ring {n}, iid" for n in (16, 32, 48)}
        _scores(panel, by_name, {"SGDm-N (centralized)": alike, "DSGDm-N": sizes, "QG-DSGDm-N": sizes}, place)
        panel.set(xlabel="nodes on the ring", ylabel="test accuracy, %")
        panel.set_title(f"α = {alpha:g}")
    handles, labels = _entries(axes)
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), title=_key(place))
    return Reproduced(figure, _table_rows(found), _best_of_columns(found))


BETAS = (0.5, 0.7, 0.9, 0.95, 0.99)
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""The paper does not print its grid; ours has its momentum 0.9 and its untuned learning rate, 0.8, inside."""


def _momentum_tuning(found: Sequence[Outcome], place: Place) -> Reproduced:
    alphas = (1, 0.1)
    figure, axes = panels(1, len(alphas), 4.6, 3.4)
    by_name = _by_name(found)
    rows: list[dict[str, object]] = []
    words, crosses = [], False
    for panel, alpha in zip(axes, alphas, strict=True):
        column = f"ring 16, α = {alpha:g}"
        quasi = by_name["QG-DSGDm-N", column]
        gaps = np.array([[_gap(quasi, by_name[_local(beta, rate), column]) for rate in RATES] for beta in BETAS])
        panel.set(xlabel="learning rate of DSGDm-N", ylabel="momentum factor β of DSGDm-N")
        panel.set_title(f"α = {alpha:g}")
        for (i, j), gap in np.ndenumerate(gaps):
            rows.append({"alpha": alpha, "beta": BETAS[i], "lr": RATES[j], "gap": gap})
        crosses |= bool(np.isinf(gaps).any())
        if np.isnan(gaps).all():
            _say(panel, "QG-DSGDm-N diverged" if quasi.diverged else "not run")
            words.append(f"α = {alpha:g}: QG-DSGDm-N {'diverged' if quasi.diverged else 'or DSGDm-N was not run'}")
            continue
        image = draw_heat_map(panel, gaps, BETAS, RATES, "cividis_r")
        figure.colorbar(image, ax=panel, label="QG-DSGDm-N is ahead by, points")
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
    """How far local momentum is behind; infinite where it diverged, no number without a run or a score to compare."""
    ours, theirs = local.ours(), quasi.ours()
    if theirs is None or not local.runs:
        return math.nan
    return math.inf if ours is None else theirs.mean - ours.mean


def _local(beta: float, rate: float) -> str:
    return f"DSGDm-N, β = {beta:g}, lr = {rate:g}"


def _scores(
    panel: Axes, by_name: Mapping[tuple[str, str], Outcome], methods: Mapping[str, Mapping[str, str]], place: Place
) -> None:
    """Scores of methods over labelled columns: ours filled, and the paper's hollow and dotted beside them."""
    labels = list(next(iter(methods.values())))
    for k, (method, columns) in enumerate(methods.items()):
        shift = 0.06 * (k - (len(methods) - 1) / 2)
        outcomes_here = {at: by_name[method, column] for at, column in enumerate(columns.values())}
        one = next(iter(outcomes_here.values()))
        ours = {at + shift: score for at, found in outcomes_here.items() if (score := found.ours())}
        _points(panel, ours, _colour(one), method, "o-")
        if place.is_papers:
            papers = {at + shift: found.cell.score for at, found in outcomes_here.items() if found.cell.score}
            _points(panel, papers, _colour(one), None, "o:")
    panel.set_xticks(range(len(labels)), labels)
    panel.set_xlim(-0.3, len(labels) - 0.7)
    if not panel.lines:
        ran = any(by_name[method, column].runs for method, columns in methods.items() for column in columns.values())
        _say(panel, "diverged" if ran else "not run")


def _points(panel: Axes, scores: Mapping[float, Score], colour: str, label: str | None, form: str) -> None:
    if scores:
        means, stds = [score.mean for score in scores.values()], [score.std or 0 for score in scores.values()]
        face = "white" if form == "o:" else colour
        panel.errorbar(
            list(scores), means, stds, fmt=form, color=colour, markerfacecolor=face, markersize=4.5, linewidth=1.2,
            capsize=2, label=label,
        )


# --------------------------------------------------------------------------------------------------- helpers


def _by_name(found: Sequence[Outcome]) -> dict[tuple[str, str], Outcome]:
    return {(one.cell.row, one.cell.column): one for one in found}


def _method(one: Outcome) -> str:
    """The method of a cell, without the model that some tables name with it."""
    return one.cell.row.rpartition(": ")[2]


def _colour(one: Outcome) -> str:
    return COLOURS.get(one.experiment.algorithm.partition(":")[0], BLACK)


def _say(panel: Axes, words: str) -> None:
    """Words in place of what is not there."""
    panel.set(xticks=[], yticks=[])
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", va="center", color=GREY)


def _first_legend(axes: Sequence[Axes]) -> None:
    """A legend in the first panel that has most curves."""
    fullest = max(axes, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    if fullest.get_legend_handles_labels()[1]:
        fullest.legend()


def _entries(axes: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """What a legend shows, of the panel that has most."""
    return max((panel.get_legend_handles_labels() for panel in axes), key=lambda entries: len(entries[1]))


def _key(place: Place) -> str | None:
    return "hollow: the paper" if place.is_papers else None


def _table_rows(found: Sequence[Outcome]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for one in found:
        values: dict[str, object] = {"row": one.cell.row, "column": one.cell.column}
        values |= {"lr": one.experiment.lr, "seeds": len(one.runs)}
        for whose, score in (("ours", one.ours()), ("paper", one.cell.score)):
            values |= {whose: score.mean if score else None, f"{whose}_std": score.std if score else None}
        rows.append(values)
    return rows


CURVES = ("lr", "loss", "train_accuracy", "accuracy", "weight_norm", "effective_step")


def _curve_rows(found: Sequence[Outcome]) -> list[dict[str, object]]:
    return [
        {"row": one.cell.row, "column": one.cell.column, "seed": run.experiment.seed, "epoch": record["epoch"]}
        | {name: record.get(name) for name in CURVES}
        for one in found
        for run in one.runs
        for record in run.records
    ]


def _best_of_columns(found: Sequence[Outcome]) -> str:
    """In words, every method's score in each column, the best first and what diverged last."""
    words = []
    for column in dict.fromkeys(one.cell.column for one in found):
        here = [one for one in found if one.cell.column == column]
        scores = {_method(one): score for one in here if (score := one.ours())}
        ranked = sorted(scores.items(), key=lambda entry: -entry[1].mean)
        said = [f"{method} {score}" for method, score in ranked]
        said += [f"{_method(one)} diverged" for one in here if one.diverged]
        if said:
            words.append(f"{column}: " + ", ".join(said))
    return "; ".join(words) + "."


def _ends(found: Sequence[Outcome], measure: str, what: str) -> str:
    """In words, a measure of each cell in its last test, the mean over seeds; a seed that diverged is not left out."""
    words = []
    for one in found:
        ends = [run.summary["last"][measure] for run in one.runs if run.summary and run.summary["last"]]
        if one.diverged or ends:
            reached = "diverged" if one.diverged else f"{sum(ends) / len(ends):.4g}"
            words.append(f"{one.cell.row}, {one.cell.column}: {reached}")
    return f"{what}: " + "; ".join(words) + "."


# -------------------------------------------------------------------------------------------------- register


def _cells(base: Settings, rows: Mapping[str, Settings], columns: Mapping[str, Settings]) -> tuple[Cell, ...]:
    """Cells that no table of the paper has a number for."""
    return tuple(
        Cell(row, column, Experiment(**{**base, **place, **settings}), None)
        for row, settings in rows.items()
        for column, place in columns.items()
    )


def _figure(name: str, title: str, cells: Sequence[Cell], draw: Callable[..., Reproduced]) -> Trained:
    rows, columns = (tuple(dict.fromkeys(getattr(cell, side) for cell in cells)) for side in ("row", "column"))
    return Trained(Table(name, title, rows, columns, tuple(cells)), draw)


def _of_table(name: str, table: str, draw: Callable[..., Reproduced]) -> Trained:
    cells = [cell for cell in TABLES[table].cells if not cell.text]
    return _figure(name, TABLES[table].title, cells, draw)


EFFECTIVE_STEP = _cells(
    {**CIFAR10, **ALONE},
    {"SGDm": {"algorithm": "sgdm"}, "QG-SGDm": {"algorithm": "qg-sgdm"}},
    {
        "BN, weight decay": {"norm": "bn"}, "GN, weight decay": {"norm": "gn"},
        "BN, none": {"norm": "bn", "weight_decay": 0.0}, "GN, none": {"norm": "gn", "weight_decay": 0.0},
    },
)
LEARNING_CURVES = [
    *sorted(TABLES["motivation"].cells, key=lambda cell: cell.column.startswith("ring")),
    *(
        Cell(cell.row, f"ImageNet, ring 16, {cell.column}", cell.experiment, cell.score)
        for cell in TABLES["imagenet"].cells
        if cell.row.startswith("ImageNet, ResNet-18 EvoNorm: ") and cell.column != "iid" and not cell.text
    ),
]
MOMENTUM_TUNING = _cells(
    {**CIFAR10, "topology": "ring:16"},
    {"QG-DSGDm-N": QG_DSGDM_N}
    | {
        _local(beta, rate): {"algorithm": with_option(DSGDM_N["algorithm"], "beta", beta), "lr": rate}
        for beta in BETAS
        for rate in RATES
    },
    by_alpha("ring:16", 1, 0.1, prefix="ring 16, "),
)

TRAINED: dict[str, Trained] = {
    figure.table.name: figure
    for figure in (
        _of_table("figure-motivation", "motivation", _motivation),
        _figure("figure-partition", "Examples per class and node, by dot size", (), _partition),
        _figure(
            "figure-effective-step", "A single worker's weight norm and effective step: ResNet-20 on CIFAR-10",
            EFFECTIVE_STEP, _effective_step,
        ),
        _of_table("figure-single-worker", "single-worker", _single_worker),
        _of_table("figure-weight-decay", "weight-decay", _weight_decay),
        _figure("figure-curves", "Learning curves: CIFAR-10 and ImageNet", LEARNING_CURVES, _eight_panels),
        _figure(
            "figure-momentum-tuning",
            "Tuning DSGDm-N's momentum factor, against QG-DSGDm-N with β = 0.9: ResNet-EvoNorm-20 on CIFAR-10",
            MOMENTUM_TUNING, _momentum_tuning,
        ),
        _of_table("figure-ring-scales", "ring-scales", _ring_scales),
    )
}
"""The figures of training runs by name."""
