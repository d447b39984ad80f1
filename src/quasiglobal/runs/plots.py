"""Figures: their style, drawing functions and files."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from quasiglobal.algorithms import name_of
from quasiglobal.common.files import replacing
from quasiglobal.errors import InputError
from quasiglobal.topology import Topology
from quasiglobal.training.metrics import Ranking

if TYPE_CHECKING:       # importing matplotlib takes a second; commands that draw nothing skip it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.typing import RcKeyType

BLUE, RED, GREEN, GREY, BLACK, ORANGE = "#0b6bb5", "#c8373a", "#2a8f5b", "#8a8a8a", "#1c1c1c", "#d98200"

COLOURS = {
    "dsgd": GREY,
    "gossip": GREY,
    "dsgdm": ORANGE,
    "dsgdm-n": RED,
    "sgdm": RED,
    "qg-dsgdm": GREEN,
    "qg-dsgdm-n": BLUE,
    "qg-sgdm": BLUE,
    "qg-sgdm-n": GREEN,
    "qg-gossip": BLUE,
    "sgdm-n": BLACK,
}
"""Colour of an algorithm in every figure."""

CYCLE = (BLUE, RED, GREEN, ORANGE, GREY, BLACK, "#7b52ab", "#00868b")
"""Colours for other algorithms."""

STYLE: dict[RcKeyType, object] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.hashsalt": "quasiglobal",
}


def style() -> AbstractContextManager[None]:
    """Context manager that applies our style to the figures made in it."""
    import matplotlib as mpl

    return mpl.rc_context(STYLE)


def panels(rows: int, columns: int, width: float, height: float, share: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of rows × columns axes, in reading order; the sizes are of one panel, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flat)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Save the figure as PNG and SVG in the folder."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: Figure, path: Path) -> None:
    """Save the figure in the format of the file extension; equal figures give identical files."""
    check_format(path)
    with style(), replacing(path) as temporary:
        figure.savefig(temporary, metadata=DATES[path.suffix.lower()])


def check_format(path: Path) -> None:
    """Raise `InputError` unless the file extension is a supported format."""
    if path.suffix.lower() not in DATES:
        raise InputError(f"cannot draw into {path}; end its name with .png, .svg or .pdf")


DATES: dict[str, dict[str, None] | None] = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Supported formats, and the metadata that keeps the date out of the file."""


Records = Sequence[Mapping[str, Any]]
"""Metrics of a run, one record per epoch."""


def draw_curves(
    curves: Mapping[str, Sequence[Records]], algorithms: Sequence[str], score: Ranking = Ranking()  # noqa: B008
) -> Figure:
    """Plot the score and the training loss over epochs; each label has the records of its seeds and an algorithm."""
    with style():
        figure, (left, right) = panels(1, 2, 4.6, 3.2)
        for (label, seeds), colour in zip(curves.items(), colours_of(algorithms), strict=True):
            of_nodes = any(isinstance(record.get(score.name), list) for records in seeds for record in records)
            draw = draw_nodes if of_nodes else draw_curve
            draw(left, seeds, score.name, colour=colour, label=label, factor=score.factor)
            draw_curve(right, seeds, "loss", colour=colour, label=label)
        several = any(len(seeds) > 1 for seeds in curves.values())
        left.set(xlabel="epoch", ylabel=score.title.replace("accuracy", "test accuracy") + _among(score.name))
        right.set(xlabel="epoch", ylabel="training loss")
        log_scale(right)
        title = "band: range over the seeds" if several else None
        left.legend(loc="upper right" if score.lower else "lower right", title=title)
    return figure


def _among(name: str) -> str:
    """Statistic over the nodes, for the title of a curve; the names of a metric's further entries imply one."""
    return "" if name.endswith(("_std", "_worst", "_best", "_averaged", "_nodes")) else ", mean of the nodes"


def colours_of(algorithms: Sequence[str]) -> list[str]:
    """A colour for each curve: that of its algorithm if no other curve has it, else an unused one.

    >>> colours_of(["dsgd", "qg-dsgdm-n:mu=0.5"]) == [GREY, BLUE]
    True
    >>> colours_of(["dsgd", "dsgd", "qg-dsgdm-n"]) == [RED, GREEN, BLUE]
    True
    """
    own = [COLOURS.get(name_of(name)) for name in algorithms]
    unique = [colour if own.count(colour) == 1 else None for colour in own]
    left = itertools.cycle([colour for colour in CYCLE if colour not in unique] or CYCLE)
    return [colour or next(left) for colour in unique]


def draw_nodes(
    axes: Axes, seeds: Sequence[Records], measure: str, *, colour: str, label: str, factor: float = 1
) -> None:
    """Plot a metric that is a list, one thin line per node and seed."""
    for k, records in enumerate(seeds):
        tested = [record for record in records if record.get(measure)]
        lines = zip(*(record[measure] for record in tested), strict=True)
        for i, values in enumerate(lines):
            shown = [np.nan if value is None else factor * value for value in values]
            epochs = [record["epoch"] for record in tested]
            axes.plot(epochs, shown, color=colour, linewidth=0.6, alpha=0.6, label=None if k or i else label)


def draw_curve(
    axes: Axes,
    seeds: Sequence[Records],
    measure: str,
    *,
    colour: str,
    label: str,
    factor: float = 1,
    band: tuple[str, str] | None = None,
    line: str = "-",
) -> None:
    """Plot the mean of a metric over the seeds, with a band.

    The band reaches from the lowest value of the first metric in `band` to the highest value of the second.
    By default it is the range of `measure`.
    """
    low, high = band or (measure, measure)
    epochs: dict[int, Records] = {}
    for records in seeds:
        for record in records:
            if record.get(measure) is not None:
                epochs[record["epoch"]] = [*epochs.get(record["epoch"], []), record]
    at = sorted(epochs)
    mean = [factor * sum(r[measure] for r in epochs[e]) / len(epochs[e]) for e in at]
    marker = "o" if len(at) == 1 else None                  # a line needs two points
    axes.plot(at, mean, color=colour, linewidth=1.4, linestyle=line, label=label, marker=marker, markersize=4)
    lowest, highest = ([factor * f(r[name] for r in epochs[e]) for e in at] for f, name in ((min, low), (max, high)))
    axes.fill_between(at, lowest, highest, color=colour, alpha=0.15, linewidth=0)


def log_scale(axes: Axes) -> None:
    """Use a logarithmic y axis if a curve has a positive point; a run that diverges at once has none."""
    if any((np.asarray(line.get_ydata(), dtype=float) > 0).any() for line in axes.lines):
        axes.set_yscale("log")


Grid = Mapping[str, Sequence[float]]
"""Values of each tuned hyperparameter."""


def draw_tuning(
    grid: Grid, scores: Mapping[tuple[float, ...], float], best: tuple[float, ...], score: Ranking = Ranking()  # noqa: B008
) -> Figure:
    """Plot the score of each grid point and mark the best: a curve over one hyperparameter, a heat map over two.

    Scores are higher if better (`Ranking.worth`); minus infinity, the score of a diverged run, is drawn as a cross.
    """
    sign, title = -1 if score.lower else 1, score.title.replace("accuracy", "test accuracy")
    with style():
        figure, (panel,) = panels(1, 1, 4.8, 3.4)
        if len(grid) == 1:
            shown = {point: sign * score.factor * value for point, value in scores.items()}
            _draw_scores(panel, grid, shown, best, title)
        else:
            (row, rows), (column, columns) = grid.items()
            values = np.array([[sign * score.factor * scores[low, high] for high in columns] for low in rows])
            image = draw_heat_map(panel, values, rows, columns, "viridis")
            figure.colorbar(image, ax=panel, label=title)
            frame_cell(panel, list(rows).index(best[0]), list(columns).index(best[1]))
            panel.set(xlabel=column, ylabel=row)
    return figure


def check_drawable(path: Path, names: Collection[str]) -> None:
    """Raise `InputError` if `draw_tuning` or `save_as` would fail; call before a long tuning."""
    if len(names) > 2:
        raise InputError(f"a plot shows one or two hyperparameters, not {', '.join(names)}; leave out --plot")
    check_format(path)


def _draw_scores(
    panel: Axes, grid: Grid, scores: Mapping[tuple[float, ...], float], best: tuple[float, ...], title: str
) -> None:
    ((name, values),) = grid.items()
    reached = [value for value in values if np.isfinite(scores[(value,)])]
    panel.plot(reached, [scores[(value,)] for value in reached], "o-", color=BLUE, linewidth=1.4, markersize=4)
    lost = [value for value in values if value not in reached]
    floor = panel.get_ylim()[0] if reached else 0.0
    if lost:
        panel.plot(lost, [floor] * len(lost), "x", color=RED, label="diverged")
    if best[0] in reached:
        mark = f"best: {best[0]:g}"
        panel.plot(best, [scores[best]], "o", color=BLUE, markersize=9, fillstyle="none", label=mark)
    if min(values) > 0:
        panel.set_xscale("log")
    panel.set_xticks(values, [f"{value:g}" for value in values])
    panel.minorticks_off()
    panel.set(xlabel=name, ylabel=title)
    panel.legend()


def draw_heat_map(
    panel: Axes, values: NDArray[np.float64], rows: Sequence[float], columns: Sequence[float], colours: str
) -> AxesImage:
    """Draw a heat map with its numbers; infinite values are crosses, NaN cells stay empty."""
    finite = values[np.isfinite(values)]
    ends = {"vmin": finite.min(), "vmax": finite.max()} if finite.size else {"vmin": 0.0, "vmax": 1.0}
    shown = np.where(np.isfinite(values), values, np.nan)
    image = panel.imshow(shown, cmap=colours, aspect="auto", **ends)
    panel.grid(False)
    panel.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    panel.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        if np.isinf(value):
            panel.text(j, i, "×", ha="center", va="center", color=RED, fontsize=12)
            continue
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else BLACK
        panel.text(j, i, f"{value:z.1f}", ha="center", va="center", color=ink, fontsize=8)
    return image


def frame_cell(panel: Axes, row: int, column: int) -> None:
    """Draw a frame around a cell of a heat map."""
    from matplotlib.patches import Rectangle

    panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=2, clip_on=False))


def draw_partitions(counts: Mapping[str, NDArray[np.int64]]) -> Figure:
    """Dot plots of the number of examples by node and class, as in the paper."""
    with style():
        figure, axes = panels(1, len(counts), 4.2, 3.4)
        for panel, (title, table) in zip(axes, counts.items(), strict=True):
            draw_dots(panel, table)
            panel.set_title(title)
    return figure


def draw_dots(panel: Axes, counts: NDArray[np.int64]) -> None:
    """Draw examples by node and class as dots, which are smaller if there are many nodes or classes."""
    nodes, classes = np.nonzero(counts)
    largest = 160 * min(1.0, 16 / len(counts), 16 / counts.shape[1])
    sizes = largest * counts[nodes, classes] / counts.max()
    panel.scatter(nodes, classes, s=sizes, color=BLUE, alpha=0.75, linewidths=0)
    panel.set(xlabel="node", ylabel="class", xlim=(-0.7, len(counts) - 0.3), ylim=(-0.7, counts.shape[1] - 0.3))
    panel.locator_params(integer=True)


def draw_topology(topology: Topology, axes: Axes) -> None:
    """Draw the graph over one period, with arrows if it is directed."""
    graph: nx.Graph[int] = nx.Graph() if topology.is_symmetric else nx.DiGraph()
    graph.add_nodes_from(range(topology.n))
    graph.add_edges_from(topology.edges)
    regular = len({degree for _, degree in graph.degree}) == 1
    place = nx.circular_layout(graph) if regular else nx.kamada_kawai_layout(graph)
    size = float(np.clip(3600 / topology.n, 40, 320))
    arrows = {} if topology.is_symmetric else {"arrowsize": 8}
    nx.draw_networkx_edges(graph, place, ax=axes, edge_color="#b9c3cc", node_size=size, **arrows)
    nx.draw_networkx_nodes(graph, place, ax=axes, node_color=BLUE, node_size=size, edgecolors="white")
    if topology.n <= 64:
        nx.draw_networkx_labels(graph, place, ax=axes, font_size=7, font_color="white")
    axes.set_axis_off()
    axes.set_aspect("equal")

