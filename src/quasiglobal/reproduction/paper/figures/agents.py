"""Figure 2: two agents that pull towards different minima, with and without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quasiglobal import topology
from quasiglobal.engines.simulator import Simulator
from quasiglobal.minimize import minimize
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.reproduction.paper.toy import pull_towards
from quasiglobal.runs.plots import BLACK, BLUE, GREEN, RED, panels
from quasiglobal.topology import Topology
from quasiglobal.training.metrics import path_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Recorder(Simulator):
    """Simulator that records the sent models: after the local update, before the average."""

    def __init__(self, graph: Topology) -> None:
        super().__init__(graph)
        self.sent: list[Tensor] = []

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        self.sent.append(tensors[0])
        return super().mix(t, tensors, time)


MINIMA = torch.tensor([[0.0, 5.0], [4.0, 0.0]], dtype=torch.float64)


def two_agents(algorithm: str, lr: float = 0.1, steps: int = 100) -> tuple[Tensor, Tensor]:
    """The agents after each local update [steps, 2, 2], and the synchronized model [steps + 1, 2]."""
    graph = topology.complete(2)
    engine = Recorder(graph)
    start = torch.zeros(2, dtype=torch.float64)
    result = minimize(pull_towards(MINIMA), start, algorithm, graph, lr=lr, steps=steps, engine=engine)
    return torch.stack(engine.sent), result.history[:, 0]


def figure_2d(betas: Sequence[float] = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)) -> Reproduced:
    """Two agents that pull towards (0, 5) and (4, 0)."""
    columns = 1 + len(betas)
    figure, axes = panels(2, columns, 1.9, 2.1, share=True)
    cells: list[tuple[Axes, str, float]] = [(axes[0], "dsgd", 0.0)]
    for line, algorithm in enumerate(("dsgdm", "qg-dsgdm")):
        cells += [(axes[line * columns + 1 + k], algorithm, beta) for k, beta in enumerate(betas)]
    axes[columns].set_axis_off()
    key = ("blue, green: the agents", "after their local updates", "black: their average", "stars: their minima",
           "larger dots: later")
    axes[columns].text(0.0, 0.5, "\n".join(key), transform=axes[columns].transAxes, va="center", fontsize=8)
    names = {"dsgd": "no momentum", "dsgdm": "heavy-ball", "qg-dsgdm": "quasi-global"}
    rows: list[dict[str, object]] = []
    words = []
    for panel, algorithm, beta in cells:
        agents, model = two_agents(f"{algorithm}:beta={beta}" if beta else algorithm)
        _draw_agents(panel, agents, model)
        panel.set_title(f"{names[algorithm]}, β = {beta}" if beta else names[algorithm])
        panel.set(xlabel="x", ylabel="y")
        for t in range(len(agents)):
            for i in range(2):
                rows.append(
                    {"algorithm": algorithm, "beta": beta, "t": t + 1, "agent": i}
                    | dict(zip(("x", "y"), agents[t, i].tolist(), strict=True))
                    | dict(zip(("model_x", "model_y"), model[t + 1].tolist(), strict=True))
                )
        if beta in (0.0, 0.9):
            spread = (agents[:, 0] - agents[:, 1]).norm(dim=-1).mean()
            words.append(
                f"{names[algorithm]}{', β = 0.9' if beta else ''}: the model travels {path_length(model):.1f}, "
                f"the agents are {spread:.2f} apart before they average"
            )
    return Reproduced(figure, rows, "; ".join(words).capitalize() + ".")


def _draw_agents(panel: Axes, agents: Tensor, model: Tensor) -> None:
    sizes = np.linspace(2, 22, len(agents))
    for i, colour in ((0, BLUE), (1, GREEN)):
        panel.scatter(agents[:, i, 0], agents[:, i, 1], s=sizes, color=colour, alpha=0.5, linewidths=0)
    panel.plot(model[:, 0], model[:, 1], color=BLACK, linewidth=0.8)
    panel.scatter(model[1:, 0], model[1:, 1], s=sizes / 2, color=BLACK, linewidths=0)
    panel.plot(MINIMA[:, 0], MINIMA[:, 1], "*", color=RED, markersize=7)
    panel.set_aspect("equal")
