"""The paper's point in under a minute, on real data: `qg demo`.

Softmax regression on handwritten digits, 16 nodes on a ring, Dirichlet α = 0.1. Every learning rate and seed
is a row of one program; the rate is chosen on validation images, the accuracy is of test images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from quasiglobal import topology
from quasiglobal.engines.simulator import Simulator
from quasiglobal.measures import consensus_distance
from quasiglobal.minimize import Result, minimize
from quasiglobal.report.plots import COLOURS, panels, style
from quasiglobal.tasks.toy import DigitsRegression, Split


@dataclass(frozen=True)
class Setting:
    """What is compared, and on what."""

    methods: tuple[str, ...] = ("sgdm-n", "dsgd", "dsgdm-n", "qg-dsgdm-n")
    rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    nodes: int = 16
    alpha: float = 0.1
    steps: int = 300
    every: int = 10

    @property
    def evaluations(self) -> list[int]:
        """The steps after which the models are tested."""
        return list(range(self.every, self.steps + 1, self.every))


@dataclass(frozen=True)
class Outcome:
    """A method with its tuned learning rate; accuracies are shares of the images."""

    algorithm: str
    rates: Tensor
    """[rates], the grid."""
    by_rate: Tensor
    """[rates], the last test accuracy with each of them, mean over nodes and seeds."""
    best: int
    """Which rate is best on the validation images."""
    steps: list[int]
    curve: Tensor
    """[evaluations, seeds, nodes], test accuracy with the best rate."""
    averaged: Tensor
    """[seeds], test accuracy of the average of the nodes' models."""
    consensus: Tensor
    """[seeds], mean ‖x_i − x̄‖² at the end."""

    @property
    def accuracy(self) -> Tensor:
        """[seeds], the nodes' mean test accuracy at the end."""
        return self.curve[-1].mean(dim=-1)

    @property
    def worst(self) -> float:
        """The worst node of all seeds."""
        return float(self.curve[-1].min())


def compare(setting: Setting, advance: Callable[[str], None] = lambda method: None) -> list[Outcome]:
    """Every method with every learning rate and seed; `advance` hears of each evaluation."""
    return [_tuned(method, setting, advance) for method in setting.methods]


def _tuned(method: str, setting: Setting, advance: Callable[[str], None]) -> Outcome:
    rates, seeds, nodes = setting.rates, setting.seeds, setting.nodes
    graph = topology.ring(nodes)
    rows = seeds * len(rates)
    problem = DigitsRegression(n=nodes, alpha=setting.alpha, seeds=rows)
    _, validation, test = problem.split()
    gradient = problem.gradients()
    grid = torch.tensor(rates)
    lr = grid.repeat_interleave(len(seeds) * nodes)[:, None]
    engine = Simulator(graph, seeds=rows)

    def accuracy(x: Tensor, examples: Split) -> Tensor:
        return problem.accuracy(x, examples).view(len(rates), len(seeds), -1)

    result: Result | None = None
    curves = []
    for step in setting.evaluations:
        result = minimize(
            gradient, torch.zeros(problem.d), method, graph, lr, step,
            weight_decay=1e-4, resume=result, keep_history=False, engine=engine,
        )
        curves.append(accuracy(result.x, test))
        advance(method)
    assert result is not None
    best = int(accuracy(result.x, validation).mean(dim=(1, 2)).argmax())
    models = result.x.view(len(rates), len(seeds), nodes, -1)[best]
    return Outcome(
        algorithm=method,
        rates=grid,
        by_rate=curves[-1].mean(dim=(1, 2)),
        best=best,
        steps=setting.evaluations,
        curve=torch.stack(curves)[:, best],
        averaged=problem.accuracy(models.mean(dim=1), test),
        consensus=consensus_distance(models),
    )


def draw(outcomes: Sequence[Outcome]) -> Figure:
    """Accuracy over the steps, every node's within the band, and against the learning rate."""
    with style():
        figure, (left, right) = panels(1, 2, 4.6, 3.2)
        for outcome in outcomes:
            colour = COLOURS[outcome.algorithm]
            percent = 100 * outcome.curve.flatten(1)
            left.plot(outcome.steps, percent.mean(dim=1), color=colour, label=outcome.algorithm)
            left.fill_between(
                outcome.steps, percent.amin(dim=1), percent.amax(dim=1), color=colour, alpha=0.12, linewidth=0
            )
            right.semilogx(outcome.rates, 100 * outcome.by_rate, "o-", color=colour, markersize=3.5)
            chosen = outcome.rates[outcome.best], 100 * outcome.by_rate[outcome.best]
            right.plot(*chosen, "o", color=colour, markersize=8, fillstyle="none")
        left.set(xlabel="step", ylabel="test accuracy, %", ylim=(60, 100))
        left.set_title("tuned: mean of the nodes; band: worst to best node")
        left.legend(loc="lower right")
        right.set(xlabel="learning rate", ylim=(60, 100))
        right.set_title("after the last step, by learning rate; ring: chosen")
    return figure


def numbers(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """One row a method, in per cent."""
    return [
        {
            "algorithm": outcome.algorithm,
            "lr": round(float(outcome.rates[outcome.best]), 6),
            "accuracy": 100 * float(outcome.accuracy.mean()),
            "std": 100 * float(outcome.accuracy.std()) if len(outcome.accuracy) > 1 else 0.0,
            "worst_node": 100 * outcome.worst,
            "averaged_model": 100 * float(outcome.averaged.mean()),
            "consensus_distance": float(outcome.consensus.mean()),
        }
        for outcome in outcomes
    ]
