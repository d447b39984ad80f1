"""The figures that need no training, by name, and the small problems that they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quasiglobal import topology
from quasiglobal.common.randomness import generator
from quasiglobal.engines.simulator import Simulator
from quasiglobal.errors import unknown
from quasiglobal.minimize import minimize
from quasiglobal.reproduction.paper.figures import Reproduced, write_figure
from quasiglobal.runs.plots import BLACK, BLUE, COLOURS, GREEN, RED, draw_topology, panels, style
from quasiglobal.topology import Topology
from quasiglobal.training.metrics import consensus_distance, path_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def gradient_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """The gradient of a function that maps each row of [n, d] to a number."""

    def gradient(x: Tensor, t: int) -> Tensor:
        slopes: Tensor = torch.func.grad(lambda rows: function(rows).sum())(x)
        return slopes

    return gradient


def rosenbrock(points: Tensor) -> Tensor:
    """(y − x²)² + 100 (x − 1)², as the paper prints it; the minimum is at (1, 1).

    >>> rosenbrock(torch.tensor([[1.0, 1.0], [0.0, 0.0]])).tolist()
    [0.0, 100.0]
    """
    x, y = points.unbind(dim=-1)
    return (y - x**2) ** 2 + 100 * (x - 1) ** 2


def winding_valley(points: Tensor) -> Tensor:
    """log(eˣ + e⁻ˣ) + 10 log(eᵘ + e⁻ᵘ), u = eˣ (y − sin 8x); the minimum is at (0, 0).

    J. Lucas, S. Sun, R. Zemel, R. Grosse: Aggregated momentum. ICLR 2019.
    """
    x, y = points.unbind(dim=-1)
    u = x.exp() * (y - torch.sin(8 * x))
    return torch.logaddexp(x, -x) + 10 * torch.logaddexp(u, -u)


def pull_towards(minima: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A gradient of length one at each node, away from the node's own minimum: constant update magnitude."""

    def gradient(x: Tensor, t: int) -> Tensor:
        return torch.nn.functional.normalize(x - minima, dim=-1)

    return gradient


@dataclass(frozen=True)
class NoisyWell:
    """Heterogeneous, non-convex, noisy problem: f_i(x) = ½ Σ_k x_k²/(1 + x_k²) + a_iᵀx, Σ a_i = 0.

    The nodes' tilts a_i have root-mean-square length ζ and mean 0; the gradient noise has variance σ².
    Rows are runs × nodes, as in the simulator.
    """

    n: int
    runs: int = 1
    d: int = 10
    sigma: float = 3.0
    zeta: float = 3.0
    seed: int = 0

    def tilts(self) -> Tensor:
        """The a_i of every row."""
        tilt = generator(self.seed, self.n).standard_normal((self.n, self.d))
        tilt -= tilt.mean(axis=0)
        size = math.sqrt((tilt**2).sum(axis=1).mean()) or 1.0
        return torch.tensor(self.zeta / size * tilt, dtype=torch.float32).repeat(self.runs, 1)

    def mean_gradient(self, x: Tensor) -> Tensor:
        """∇f of the mean objective at any point."""
        return x / (1 + x**2) ** 2

    def gradients(self) -> Callable[[Tensor, int], Tensor]:
        """Each node's noisy gradient; the noise is a function of (seed, t)."""
        tilts, noise = self.tilts(), torch.Generator()

        def gradient(x: Tensor, t: int) -> Tensor:
            xi = torch.randn(x.shape, generator=noise.manual_seed(self.seed * 2**32 + t))
            return self.mean_gradient(x) + tilts + self.sigma / math.sqrt(self.d) * xi

        return gradient


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
    sizes = np.linspace(2, 22, 100)
    for panel, algorithm, beta in cells:
        agents, model = two_agents(f"{algorithm}:beta={beta}" if beta else algorithm, steps=len(sizes))
        for i, colour in ((0, BLUE), (1, GREEN)):
            panel.scatter(agents[:, i, 0], agents[:, i, 1], s=sizes, color=colour, alpha=0.5, linewidths=0)
        panel.plot(model[:, 0], model[:, 1], color=BLACK, linewidth=0.8)
        panel.scatter(model[1:, 0], model[1:, 1], s=sizes / 2, color=BLACK, linewidths=0)
        panel.plot(MINIMA[:, 0], MINIMA[:, 1], "*", color=RED, markersize=7)
        panel.set_aspect("equal")
        panel.set_title(f"{names[algorithm]}, β = {beta}" if beta else names[algorithm])
        panel.set(xlabel="x", ylabel="y")
        rows += [
            {"algorithm": algorithm, "beta": beta, "t": t, "agent": i, "x": x, "y": y, "model_x": mx, "model_y": my}
            for t, (pair, (mx, my)) in enumerate(zip(agents.tolist(), model[1:].tolist(), strict=True), start=1)
            for i, (x, y) in enumerate(pair)
        ]
        if beta in (0.0, 0.9):
            spread = (agents[:, 0] - agents[:, 1]).norm(dim=-1).mean()
            words.append(
                f"{names[algorithm]}{', β = 0.9' if beta else ''}: the model travels {path_length(model):.1f}, "
                f"the agents are {spread:.2f} apart before they average"
            )
    return Reproduced(figure, rows, "; ".join(words).capitalize() + ".")


CONSENSUS_GRAPHS = ("ring:16", "ring:32", "ring:64", "torus:16", "torus:64", "torus:100", "torus:256", "social")
LEVELS = (1e-2, 1e-4)


def consensus_curve(algorithm: str, graph: Topology, steps: int, d: int = 100, seed: int = 0) -> Tensor:
    """Ξ²(t)/Ξ²(0) from a random start."""
    x0 = torch.randn(graph.n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    history = minimize(None, x0, algorithm, graph, lr=1.0, steps=steps).history
    return (distance := consensus_distance(history)) / distance[0]


def crossings(curve: Tensor, level: float) -> tuple[int | None, int | None]:
    """The first step at or below the level, and the step from which the curve stays there.

    >>> crossings(torch.tensor([1.0, 0.1, 0.3, 0.1]), 0.2)
    (1, 3)
    """
    above = (curve > level).nonzero().flatten()
    below = (curve <= level).nonzero().flatten()
    first = int(below[0]) if len(below) else None
    last = int(above[-1]) + 1 if len(above) else 0
    return first, last if last < len(curve) else None


def figure_consensus(graphs: Sequence[str] = CONSENSUS_GRAPHS) -> Reproduced:
    """Gossip against quasi-global gossip, without gradients."""
    columns = min(4, len(graphs))
    figure, axes = panels(math.ceil(len(graphs) / columns), columns, 2.9, 2.4)
    rows: list[dict[str, object]] = []
    found: dict[tuple[str, str, float], tuple[int | None, int | None]] = {}
    for panel, name in zip(axes, graphs, strict=False):
        graph = topology.parse(name)
        assert graph.rho is not None
        needed = math.log(1e-6) / math.log(max(1 - graph.rho, 1e-3))        # of plain gossip, to reach 1e-6
        steps = max(150, math.ceil(needed))                                 # for the rebound of quasi-global gossip
        for algorithm in ("gossip", "qg-gossip"):
            curve = consensus_curve(algorithm, graph, steps)
            panel.semilogy(curve.numpy(), color=COLOURS[algorithm], label=algorithm)
            marks: dict[str, object] = {}
            for level in LEVELS:
                first, last = found[name, algorithm, level] = crossings(curve, level)
                marks |= {f"first<={level:g}": first, f"last<={level:g}": last}
            rows += [
                {"topology": name, "algorithm": algorithm, "t": t, "distance": value} | marks
                for t, value in enumerate(curve.tolist())
            ]
        for level in LEVELS:
            panel.axhline(level, color="#bbbbbb", linewidth=0.7, linestyle=":")
        panel.set_title(f"{name}, ρ = {graph.rho:.3g}")
        panel.set_ylim(1e-6, 2)
    for panel in axes[len(graphs):]:
        panel.set_visible(False)
    axes[0].legend()
    for k, panel in enumerate(axes):
        panel.set_ylabel("Ξ² / Ξ²(0)" if k % columns == 0 else "")
        panel.set_xlabel("step" if k + columns >= len(graphs) else "")
    sentences = []
    for level in LEVELS:
        for which, event in enumerate(("first reaches", "reaches for good")):
            steps_of = {key: math.inf if (t := times[which]) is None else t for key, times in found.items()}
            lead = {name: steps_of[name, "gossip", level] - steps_of[name, "qg-gossip", level] for name in graphs}
            sooner, later = (
                ", ".join(name for name in graphs if sign * lead[name] > 0) or "none of them" for sign in (1, -1)
            )
            sentences.append(f"Quasi-global gossip {event} {level:g} sooner on {sooner}; plain gossip wins on {later}.")
    return Reproduced(figure, rows, " ".join(sentences))


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
    grid = torch.meshgrid(torch.linspace(*x_range, 200), torch.linspace(*y_range, 200), indexing="xy")
    heights = function(torch.stack(grid, dim=-1)).log1p()
    rows: list[dict[str, object]] = []
    words = []
    for panel, setting in zip(axes, settings, strict=False):
        panel.contourf(*grid, heights, levels=24, cmap="Greys", alpha=0.55)
        panel.grid(False)
        lengths = []
        for algorithm in ("sgdm", "qg-sgdm"):
            way = trajectory(function, f"{algorithm}:beta={setting.beta}", setting.start, setting.lr, steps)
            lengths.append(float(path_length(way)))
            panel.plot(way[:, 0], way[:, 1], color=COLOURS[algorithm], linewidth=1, label=algorithm)
            value = float(function(way[-1:]))
            rows += [
                {
                    "algorithm": algorithm, "beta": setting.beta, "lr": setting.lr, "start": setting.start,
                    "t": t, "x": x, "y": y, "path_length": lengths[-1], "final_value": value,
                }
                for t, (x, y) in enumerate(way.tolist())
            ]
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


def figure_topology() -> Reproduced:
    """The paper's social network."""
    graph = topology.social()
    figure, (panel,) = panels(1, 1, 6, 5)
    draw_topology(graph, panel)
    rows: list[dict[str, object]] = [{"from": i, "to": j, "weight": graph.weights()[i, j]} for i, j in graph.edges]
    says = (
        f"The social network has {graph.n} nodes and {len(graph.edges)} edges; "
        f"ρ = {graph.rho:.3f}, λ₂ = {graph.lambda_2:.3f}, λ_min = {graph.lambda_min:.3f}."
    )
    return Reproduced(figure, rows, says)


def mean_square_gradients(
    graph: Topology, horizons: Sequence[int], c: float, repeats: int, algorithm: str = "qg-dsgdm"
) -> Tensor:
    """(1/T) Σ ‖∇f(x̄)‖² for each horizon T, with the theorem's step size η = c √(n/T).

    All horizons and repeats are rows of one program, each with its own learning rate.
    """
    runs = len(horizons) * repeats
    problem = NoisyWell(n=graph.n, runs=runs)
    rate = torch.tensor([c * math.sqrt(graph.n / T) for T in horizons])
    gradients = problem.gradients()
    start = torch.ones(runs * graph.n, problem.d)       # beyond the inflection, where the curvature is negative
    totals: list[Tensor] = []

    def gradient(x: Tensor, t: int) -> Tensor:
        centre = x.view(runs, graph.n, -1).mean(dim=1)
        totals.append(problem.mean_gradient(centre).square().sum(dim=1))
        return gradients(x, t)

    minimize(
        gradient, start, algorithm, graph,
        lr=rate.repeat_interleave(repeats * graph.n)[:, None], steps=max(horizons),
        engine=Simulator(graph, seeds=range(runs)), keep_history=False,
    )
    sums = torch.stack(totals).cumsum(dim=0).view(-1, len(horizons), repeats)
    return torch.stack([sums[T - 1, k].mean() / T for k, T in enumerate(horizons)])


def steps_needed(horizons: Sequence[int], values: Tensor, level: float) -> float | None:
    """Steps at which the values fall to the level for good, log-log interpolated; None if outside the horizons."""
    above = (values > level).nonzero().flatten()
    if len(above) == 0 or int(above[-1]) + 1 == len(horizons):
        return None
    k = int(above[-1])
    high, low = values[k : k + 2].log().tolist()
    share = (high - math.log(level)) / (high - low)
    return float(horizons[k] * (horizons[k + 1] / horizons[k]) ** share)


def figure_speedup(
    sizes: Sequence[int] = (4, 8, 16, 32, 64),
    horizons: Sequence[int] = (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    level: float = 0.08,
    c: float = 0.3,
    repeats: int = 4,
) -> Reproduced:
    """Steps to a small gradient against n, where the theorem predicts a linear speed-up.

    As in the theorem, the step size is η = c√(n/T) for a run of T steps, and the gradient is measured by the mean of
    ‖∇f(x̄)‖² over the run. The figure shows the smallest T with a mean of at most ε.
    """
    figure, (panel,) = panels(1, 1, 5, 3.6)
    rows: list[dict[str, object]] = []
    words = []
    for kind, colour in (("complete", BLACK), ("one-peer-exponential", BLUE), ("ring", RED)):
        needed: dict[int, float] = {}
        for n in sizes:
            graph = topology.parse(f"{kind}:{n}")
            steps = steps_needed(horizons, mean_square_gradients(graph, horizons, c, repeats), level)
            rows.append({"topology": kind, "n": n, "rho": graph.rho, "steps": steps, "epsilon": level})
            if steps is None:
                words.append(f"{kind}: not within {max(horizons)} steps at n = {n}")
            else:
                needed[n] = steps
        panel.loglog(list(needed), list(needed.values()), "o-", color=colour, label=kind, base=2)
        if len(needed) > 1:
            fewest, most = min(needed), max(needed)
            gain = needed[fewest] / needed[most]
            words.append(
                f"{kind}: {needed[fewest]:.0f} steps at n = {fewest}, {needed[most]:.0f} at n = {most}, "
                f"{gain:.1f} times fewer for {most / fewest:.0f} times the nodes"
            )
        if kind == "complete" and needed:
            ideal = [needed[min(needed)] * min(needed) / n for n in sizes]
            panel.loglog(sizes, ideal, ":", color="#999999", label="linear speed-up", base=2)
    panel.set(xlabel="nodes n", ylabel=f"steps until mean ‖∇f‖² ≤ {level:g}")
    panel.set_xticks(sizes, [str(n) for n in sizes])
    panel.legend()
    return Reproduced(figure, rows, "qg-dsgdm, η = c√(n/T). " + "; ".join(words) + ".")


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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)        # more do not speed up such small problems, and slow them down on a busy machine
    try:
        with style():
            made = FIGURES[name]()
    finally:
        torch.set_num_threads(threads)
    return made, write_figure(made, name, folder)
