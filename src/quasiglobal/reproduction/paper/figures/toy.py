"""The figures that need no training, by name; `qg reproduce NAME` makes them.

Each function computes its numbers with `qg.minimize`, draws them and describes them in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quasiglobal.errors import unknown
from quasiglobal.reproduction.paper.figures.agents import figure_2d
from quasiglobal.reproduction.paper.figures.consensus import figure_consensus
from quasiglobal.reproduction.paper.figures.made import Reproduced, write_figure
from quasiglobal.reproduction.paper.figures.theory import figure_speedup, figure_topology
from quasiglobal.reproduction.paper.figures.trajectories import figure_nonconvex, figure_rosenbrock
from quasiglobal.runs.plots import style

FIGURES: dict[str, Callable[[], Reproduced]] = {
    "figure-2d": figure_2d,
    "figure-consensus": figure_consensus,
    "figure-rosenbrock": figure_rosenbrock,
    "figure-nonconvex": figure_nonconvex,
    "figure-topology": figure_topology,
    "figure-speedup": figure_speedup,
}
"""The figures that need no training, by name."""


def make_figure(name: str, folder: Path) -> tuple[Reproduced, list[Path]]:
    """Make a figure and write it to the folder as PNG, SVG and CSV."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    with style(), one_thread():
        made = FIGURES[name]()
    return made, write_figure(made, name, folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: more threads do not speed up such small problems, and slow them down on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
