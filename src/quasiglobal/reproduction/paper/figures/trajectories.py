"""Figure 4: trajectories of a single worker on two-dimensional functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quasiglobal.minimize import minimize
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.reproduction.paper.toy import gradient_of, rosenbrock, winding_valley
from quasiglobal.runs.plots import BLACK, COLOURS, panels
from quasiglobal.training.metrics import path_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def trajectory(
    function: Callable[[Tensor], Tensor], algorithm: str, start: tuple[float, float], lr: float, steps: int
) -> Tensor:
    """Trajectory of a single worker on a 2-D function, [steps + 1, 2]."""
    x0 = torch.tensor(start, dtype=torch.float64)
    return minimize(gradient_of(function), x0, algorithm, "complete:1", lr=lr, steps=steps).history[:, 0]


@dataclass(frozen=True)
class TrajectoryPanel:
    """One panel of a trajectory figure."""

    beta: float
    lr: float
    start: tuple[float, float]


ROSENBROCK = [
    TrajectoryPanel(beta, 0.001, start) for beta in (0.9, 0.99) for start in ((0, 0), (2, 0), (0, 2), (2, 2))
]
NONCONVEX = [
    TrajectoryPanel(beta, lr, (-2, 0))
    for beta, lr in ((0.9, 0.05), (0.9, 0.01), (0.9, 0.005), (0.99, 0.01), (0.99, 0.005))
]


def figure_rosenbrock(steps: int = 1000) -> Reproduced:
    """SGDm against QG-SGDm on (y − x²)² + 100 (x − 1)²."""
    return _trajectories(rosenbrock, ROSENBROCK, steps, (-0.6, 2.6), (-1.2, 3.2), (1, 1), columns=4)


def figure_nonconvex(steps: int = 1000) -> Reproduced:
    """SGDm against QG-SGDm on a second toy function, a winding valley, from (−2, 0)."""
    return _trajectories(winding_valley, NONCONVEX, steps, (-2.6, 1.0), (-1.6, 1.6), (0, 0), columns=3)


def _trajectories(
    function: Callable[[Tensor], Tensor],
    settings: Sequence[TrajectoryPanel],
    steps: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    minimum: tuple[float, float],
    columns: int,
) -> Reproduced:
    figure, axes = panels(math.ceil(len(settings) / columns), columns, 3.0, 2.6)
    rows: list[dict[str, object]] = []
    words = []
    for panel, setting in zip(axes, settings, strict=False):
        _contours(panel, function, x_range, y_range)
        lengths = []
        for algorithm in ("sgdm", "qg-sgdm"):
            way = trajectory(function, f"{algorithm}:beta={setting.beta}", setting.start, setting.lr, steps)
            lengths.append(float(path_length(way)))
            panel.plot(way[:, 0], way[:, 1], color=COLOURS[algorithm], linewidth=1, label=algorithm)
            value = float(function(way[-1:]))
            for t, (x, y) in enumerate(way.tolist()):
                rows.append(
                    {"algorithm": algorithm, "beta": setting.beta, "lr": setting.lr, "start": setting.start}
                    | {"t": t, "x": x, "y": y, "path_length": lengths[-1], "final_value": value}
                )
        panel.plot(*minimum, "*", color=BLACK, markersize=8)
        panel.set(xlim=x_range, ylim=y_range, xlabel="x", ylabel="y")
        panel.set_title(f"β = {setting.beta}, η = {setting.lr}, from {setting.start}")
        first, second = (f"{length:.2f}" if length < 1e6 else "it diverges" for length in lengths)
        words.append(f"β = {setting.beta}, η = {setting.lr}, {setting.start}: {first} and {second}")
    for panel in axes[len(settings):]:
        panel.set_visible(False)
    axes[0].legend(loc="lower right")
    says = f"Path lengths of sgdm and qg-sgdm over {steps} steps: " + "; ".join(words) + "."
    return Reproduced(figure, rows, says)


def _contours(
    panel: Axes,
    function: Callable[[Tensor], Tensor],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> None:
    grid = torch.stack(
        torch.meshgrid(torch.linspace(*x_range, 200), torch.linspace(*y_range, 200), indexing="xy"), dim=-1
    )
    panel.contourf(grid[..., 0], grid[..., 1], function(grid).log1p(), levels=24, cmap="Greys", alpha=0.55)
    panel.grid(False)
