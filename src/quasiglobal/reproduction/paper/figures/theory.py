"""Figures of the social network and of the theorem's linear speed-up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quasiglobal import topology
from quasiglobal.engines.simulator import Simulator
from quasiglobal.minimize import minimize
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.reproduction.paper.toy import NoisyWell
from quasiglobal.runs.plots import BLACK, BLUE, RED, draw_topology, panels
from quasiglobal.topology import Topology


def figure_topology() -> Reproduced:
    """The paper's social network."""
    graph = topology.social()
    figure, (panel,) = panels(1, 1, 6, 5)
    draw_topology(graph, panel)
    rows: list[dict[str, object]] = [
        {"from": i, "to": j, "weight": graph.weights()[i, j]} for i, j in graph.edges
    ]
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
    totals: list[Tensor] = []

    def gradient(x: Tensor, t: int) -> Tensor:
        centre = x.view(runs, graph.n, -1).mean(dim=1)
        totals.append(problem.mean_gradient(centre).square().sum(dim=1))
        return gradients(x, t)

    minimize(
        gradient, problem.start(), algorithm, graph,
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
