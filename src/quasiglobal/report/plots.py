"""How a figure looks and where it goes; what it shows is the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from quasiglobal.errors import InputError
from quasiglobal.files import replacing
from quasiglobal.topology import Topology

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
    "qg-gossip": BLUE,
    "sgdm-n": BLACK,
}
"""An algorithm has the same colour in every figure."""

CYCLE = (BLUE, RED, GREEN, ORANGE, GREY, BLACK, "#7b52ab", "#00868b")
"""For what has no colour of its own."""

STYLE: Any = {
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
    """Our look for the figures made within it."""
    return mpl.rc_context(STYLE)


def panels(
    rows: int, columns: int, width: float, height: float, share: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of rows × columns axes, in reading order; the sizes are of one panel, in inches."""
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flat)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as PNG and SVG in the folder."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        save_as(figure, path)
    return paths


def save_as(figure: Figure, path: Path) -> None:
    """The figure in the format that the file's name ends with; the same figure gives the same file."""
    dates = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    if path.suffix.lower() not in dates:
        raise InputError(f"cannot draw into {path}; end its name with .png, .svg or .pdf")
    metadata = dates[path.suffix.lower()]
    with style(), replacing(path) as temporary:
        figure.savefig(temporary, metadata=metadata)


Records = Sequence[Mapping[str, Any]]
"""What was measured in a run, an entry an epoch."""


def draw_curves(curves: Mapping[str, Sequence[Records]]) -> Figure:
    """Test accuracy and training loss over the epochs; each label has the records of several seeds."""
    with style():
        figure, (left, right) = panels(1, 2, 4.6, 3.2)
        for k, (label, seeds) in enumerate(curves.items()):
            colour = COLOURS.get(label.partition(":")[0], CYCLE[k % len(CYCLE)])
            draw_curve(left, seeds, "accuracy", colour=colour, label=label, factor=100)
            draw_curve(right, seeds, "loss", colour=colour, label=label)
        several = any(len(seeds) > 1 for seeds in curves.values())
        left.set(xlabel="epoch", ylabel="test accuracy, %, mean of the nodes")
        right.set(xlabel="epoch", ylabel="training loss", yscale="log")
        left.legend(loc="lower right", title="band: from seed to seed" if several else None)
    return figure


def draw_curve(
    axes: Axes,
    seeds: Sequence[Records],
    measure: str,
    *,
    colour: str,
    label: str,
    factor: float = 1,
    band: tuple[str, str] | None = None,
) -> None:
    """The mean of a measure over the seeds, within a band from the lowest of one measure to the highest of another.

    Without a `band` it is the measure's own range.
    """
    low, high = band or (measure, measure)
    epochs: dict[int, Records] = {}
    for records in seeds:
        for record in records:
            if record.get(measure) is not None:
                epochs[record["epoch"]] = [*epochs.get(record["epoch"], []), record]
    at = sorted(epochs)
    mean = [factor * sum(r[measure] for r in epochs[e]) / len(epochs[e]) for e in at]
    axes.plot(at, mean, color=colour, linewidth=1.4, label=label)
    lowest, highest = ([factor * f(r[name] for r in epochs[e]) for e in at] for f, name in ((min, low), (max, high)))
    axes.fill_between(at, lowest, highest, color=colour, alpha=0.15, linewidth=0)


def draw_partitions(counts: Mapping[str, NDArray[np.int64]]) -> Figure:
    """The paper's dots: how many examples of each class each node has."""
    with style():
        figure, axes = panels(1, len(counts), 4.2, 3.4)
        for panel, (title, table) in zip(axes, counts.items(), strict=True):
            nodes, classes = np.nonzero(table)
            sizes = 160 * table[nodes, classes] / table.max()
            panel.scatter(nodes, classes, s=sizes, color=BLUE, alpha=0.75, linewidths=0)
            panel.set(xlabel="node", ylabel="class", xlim=(-0.7, len(table) - 0.3), ylim=(-0.7, table.shape[1] - 0.3))
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.yaxis.set_major_locator(MaxNLocator(integer=True))
            panel.set_title(title)
    return figure


def draw_topology(topology: Topology, axes: Axes) -> None:
    """The graph over a period, arrows where it is directed."""
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

