"""Measure the effect of lost messages on each algorithm that uses only neighbours: 16 nodes on a ring, quadratics.

    python benchmarks/faults.py                        # a few minutes on two cores; prints Markdown

Node i has f_i(x) = ½ (x − b_i)ᵀ A_i (x − b_i), A_i diagonal in [0.5, 1.5], and a noisy gradient. The error is the
nodes' root mean square distance to the minimiser of Σ f_i, over the last 200 steps and all seeds, relative to the
initial distance. The drift is the distance that the mean moves in 500 steps without gradients, relative to the nodes'
initial disagreement. The growth is the error at the end over the error at half time: 1 if it has settled, √2 for a
random walk. A run diverges if its final error exceeds the initial one. D² runs on lazy/ring:16: it needs λ_min > −1/3,
and RelaySGD on chain:16: it needs a tree.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor

import quasiglobal as qg
from quasiglobal.algorithms import ALGORITHMS, algorithm, name_of
from quasiglobal.common.files import markdown_table
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.simulator import Simulator
from quasiglobal.reproduction.leaderboard.contenders import PLAIN

N, D, NOISE, TAIL = 16, 10, 0.1, 200
DROPS = (0.0, 0.1, 0.3)
CHURN = 0.1
LR = 0.05
"""Learning rate of plain SGD. Adam uses a tenth, and so does momentum 0.9, whose steps sum to ten times a gradient."""
VARIANTS = ("push-diging:sums=true", "push-diging:sums=true,beta=0.9", "lt-admm:tau=1,beta_a=0.1")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Quadratics:
    """The nodes' functions, the same for all runs, with gradient noise that differs between runs."""

    def __init__(self, runs: int) -> None:
        self.runs, self.b = runs, draw(1, N, D)
        self.A = 0.5 + torch.rand(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        self.minimiser = (self.A * self.b).sum(dim=0) / self.A.sum(dim=0)

    def gradient(self, x: Tensor, t: int) -> Tensor:
        slopes = (self.A * (x.view(self.runs, N, D) - self.b)).view_as(x)
        return slopes + NOISE * draw(1000 + t, *x.shape)

    def error(self, x: Tensor) -> Tensor:
        return (x - self.minimiser).square().sum(dim=1).mean().sqrt()


def error(name: str, topology: str, lr: float, steps: int, runs: int, **faults: float) -> tuple[float, float]:
    """The final error, relative to the initial one and to the error at half time."""
    problem = Quadratics(runs)
    x0 = draw(3, N, D).repeat(runs, 1) + 3.0
    half, end = [], []

    def gradient(x: Tensor, t: int) -> Tensor:
        for errors, last in ((half, steps // 2), (end, steps)):
            if last - TAIL < t <= last:
                errors.append(problem.error(x))
        return problem.gradient(x, t)

    engine = Simulator(qg.topology.parse(topology), seeds=range(runs), **faults)
    try:
        qg.minimize(gradient, x0, name, topology, lr, steps, engine=engine, keep_history=False)
    except qg.Diverged:
        return float("inf"), float("inf")
    final, before = (float(torch.stack(errors).square().mean().sqrt()) for errors in (end, half))
    return final / float(problem.error(x0)), final / before


def drift(name: str, topology: str, lr: float, runs: int, drop: float) -> float:
    """Distance that the mean moves without gradients, relative to the nodes' initial disagreement."""
    x0 = draw(4, runs * N, D)
    engine = Simulator(qg.topology.parse(topology), seeds=range(runs), drop=drop)
    try:
        x = qg.minimize(None, x0, name, topology, lr, 500, engine=engine, keep_history=False).x
    except qg.Diverged:
        return float("inf")
    start, end = (rows.view(runs, N, D) for rows in (x0, x))
    moved = (end.mean(dim=1) - start.mean(dim=1)).square().sum(dim=1).mean()
    apart = (start - start.mean(dim=1, keepdim=True)).square().sum(dim=2).mean()
    return float((moved / apart).sqrt())


def learning_rate(name: str) -> float:
    plain = name_of(name) in PLAIN or not getattr(algorithm(name), "beta", 0.0)
    return LR if plain and name not in ("dadam", "dadamw", "qg-dadam", "noloco") else LR / 10


def row(name: str, steps: int, runs: int) -> list[str]:
    needs = algorithm(name).needs
    lazy = needs.lambda_min_above is not None and not needs.lazy
    topology = f"chain:{N}" if needs.tree else f"lazy/ring:{N}" if lazy else f"ring:{N}"
    lr = learning_rate(name)
    drifts = [f"{drift(name, topology, lr, runs, drop):.2g}" for drop in DROPS]
    label = f"`{name}`" + ("" if topology == f"ring:{N}" else f" on `{topology}`")
    if name in ("gossip", "qg-gossip"):
        return [label, "", *drifts, *[""] * 7]
    settings = [{"drop": drop} for drop in DROPS] + [{"churn": CHURN}]
    found = [error(name, topology, lr, steps, runs, **faults) for faults in settings]
    base = found[0][0]
    worse = [f"× {value / base:.3g}" for value, _ in found[1:]]
    growth = [f"{found[k][1]:.2f}" for k in (0, len(DROPS) - 1)]
    return [label, f"{lr:g}", *drifts, f"{base:.3g}", *worse, *growth, "yes" if max(found)[0] > 1 else "no"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=16, help="number of seeds, as rows of one program")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.runs = 20, 1
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*(loses its exactness|is cut off)")
    names = ("gossip", "qg-dsgdm-n", *VARIANTS[:1]) if args.tiny else (*ALGORITHMS, *VARIANTS)
    everything = {name: algorithm(name) for name in names}
    bearing = [name for name, one in everything.items() if one.needs.loss != "refused" and not traffic(one).means]
    columns = ["algorithm", "lr", *(f"drift, drop {drop:g}" for drop in DROPS), "error, no faults"]
    columns += [*(f"drop {drop:g}" for drop in DROPS[1:]), f"churn {CHURN:g}"]
    columns += ["growth, no faults", f"growth, drop {DROPS[-1]:g}", "diverges"]
    print(markdown_table(columns, [row(name, args.steps, args.runs) for name in bearing]))


if __name__ == "__main__":
    main()
