"""Figure 3: how fast nodes agree by gossip and by quasi-global gossip, without gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quasiglobal import topology
from quasiglobal.minimize import minimize
from quasiglobal.reproduction.paper.figures.made import Reproduced
from quasiglobal.runs.plots import COLOURS, panels
from quasiglobal.topology import Topology
from quasiglobal.training.metrics import consensus_distance

CONSENSUS_GRAPHS = (
    "ring:16", "ring:32", "ring:64", "torus:16", "torus:64", "torus:100", "torus:256", "social",
)
LEVELS = (1e-2, 1e-4)


def consensus_curve(algorithm: str, graph: Topology, steps: int, d: int = 100, seed: int = 0) -> Tensor:
    """Ξ²(t)/Ξ²(0) from a random start."""
    x0 = torch.randn(graph.n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    history = minimize(None, x0, algorithm, graph, lr=1.0, steps=steps).history
    distance = consensus_distance(history)
    return distance / distance[0]


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
        steps = _steps_to(1e-6, graph)
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
            sooner: list[str] = []
            later: list[str] = []
            for name in graphs:
                quasi, plain = (found[name, algorithm, level][which] for algorithm in ("qg-gossip", "gossip"))
                before, after = (math.inf if t is None else t for t in (quasi, plain))
                if before != after:
                    (sooner if before < after else later).append(name)
            sentences.append(
                f"Quasi-global gossip {event} {level:g} sooner on {_list(sooner)}; plain gossip wins on {_list(later)}."
            )
    return Reproduced(figure, rows, " ".join(sentences))


def _steps_to(level: float, graph: Topology) -> int:
    """Steps for plain gossip to reach the level; at least 150, for the rebound of quasi-global gossip."""
    assert graph.rho is not None
    return max(150, math.ceil(math.log(level) / math.log(max(1 - graph.rho, 1e-3))))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none of them"
