"""Digits on 8 nodes that average models, one of which may lie: over real edges in threads, or simulated, which is fast.

`python lies.py liars`, `honest` and `absences` print the numbers of docs/deploy.md.
"""

import math
import sys
import threading
from functools import partial
from statistics import fmean

import numpy as np
import torch
from connections import at_once
from sklearn.datasets import load_digits
from torch.distributed import HashStore

import quasiglobal as qg
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.trust import SUGGESTED, Guard, Trust

N, LIAR, HIDDEN, BATCH, TESTED = 8, 3, 64, 32, 400

SHAPES = [(HIDDEN, 64), (HIDDEN,), (10, HIDDEN), (10,)]

LIES = {
    "huge": lambda told, first, heard: torch.full_like(told, 1e30),
    "opposite": lambda told, first, heard: -told,
    "noise": lambda told, first, heard: torch.randn(told.shape, dtype=told.dtype),
    "stale": lambda told, first, heard: first,
    "copied": lambda told, first, heard: heard.clone(),
    "zeros": lambda told, first, heard: torch.zeros_like(told),
}
"""What a liar tells; "stale" is its first model, for ever, "copied" the last one that it has heard of a neighbour."""


def digits(spread):
    """Return the examples of each node and those of the test; `spread` is iid, sorted (by label), or an alpha."""
    inputs, labels = load_digits(return_X_y=True)
    inputs, labels = torch.tensor((inputs / 16 - 0.3) / 0.4), torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[:TESTED], order[TESTED:]
    by_label = rest[torch.argsort(labels[rest], stable=True)]
    if spread == "sorted":
        parts = list(by_label.tensor_split(N))
    elif spread == "iid":
        parts = [rest[k::N] for k in range(N)]
    else:
        draw, of = np.random.default_rng(0), labels[by_label].numpy()
        cuts = [(draw.dirichlet([float(spread)] * N).cumsum()[:-1] * (of == c).sum()).astype(int) for c in range(10)]
        pieces = [by_label[of == c].tensor_split(cuts[c].tolist()) for c in range(10)]
        parts = [torch.cat([piece[k] for piece in pieces] + [rest[k : k + 1]]) for k in range(N)]
    return [(inputs[part], labels[part]) for part in parts], (inputs[test], labels[test])


def start():
    generator = torch.Generator().manual_seed(1)
    return torch.cat([
        (torch.randn(shape, generator=generator, dtype=torch.float64) * (len(shape) > 1) / shape[-1] ** 0.5).flatten()
        for shape in SHAPES
    ])[None]


def outputs(models, inputs):
    """The outputs of models [k, d] on inputs [k, batch, 64]."""
    parts = torch.split(models, [math.prod(shape) for shape in SHAPES], dim=1)
    a, b, c, d = (part.view(-1, *shape) for part, shape in zip(parts, SHAPES, strict=True))
    return torch.relu(inputs @ a.mT + b[:, None]) @ c.mT + d[:, None]


def train(engine, steps, spread="iid", lr=0.05, algorithm="qg-dsgdm-n"):
    """Train the engine's nodes; return their models and their accuracies in percent."""
    parts, (inputs, labels) = digits(spread)
    mine = [parts[k] for k in engine.nodes]
    generators = [torch.Generator().manual_seed(k) for k in engine.nodes]

    def gradient(models, t):
        chosen = [torch.randint(len(y), (BATCH,), generator=g) for (_, y), g in zip(mine, generators, strict=True)]
        x, y = (torch.stack([part[k][at] for part, at in zip(mine, chosen, strict=True)]) for k in (0, 1))
        with torch.enable_grad():
            rows = models.detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(outputs(rows, x).mT, y, reduction="sum") / BATCH
            return torch.autograd.grad(loss, rows)[0]

    rate = lambda t: lr if t <= 0.75 * steps else lr / 10  # noqa: E731
    x0 = start().expand(len(mine), -1).clone()
    result = qg.minimize(
        gradient, x0, algorithm, engine.topology, rate, steps, 1e-4, engine=engine, keep_history=False,
    )
    right = (outputs(result.x, inputs.expand(len(mine), -1, -1)).argmax(dim=2) == labels).double().mean(dim=1)
    return result.x, (100 * right).tolist()


# ------------------------------------------------------------------------------------------------ over real edges


class Liar(Distributed):
    """A process that sends something else than its model; `kind` names it."""

    kind, first, heard = "huge", None, None

    def _rows_from_others(self, t, message, like, raw=False):
        self.first = message.clone() if self.first is None else self.first
        told = LIES[self.kind](message, self.first, message if self.heard is None else self.heard)
        received = super()._rows_from_others(t, told, like, raw)
        self.heard = next((rows[:, :, None] for rows in received.values()), self.heard)
        return received


def in_threads(topology, trust, steps, lie=None, **how):
    """Train N nodes in threads; return the model, accuracy and clipped neighbours of each, None for the liar."""
    store, done = HashStore(), threading.Barrier(N)

    def work(rank):
        kind = Liar if lie and rank == LIAR else Distributed
        engine = kind(qg.topology.parse(topology), store, rank, [(k,) for k in range(N)], timeout=60, trust=trust)
        engine.kind = lie
        try:
            x, (right,) = train(engine.connect(), steps, **how)
            clipped = {int(there): one["clipped"] for there, one in engine.accounts().items() if one["clipped"]}
            return None if kind is Liar else (x, right, clipped)
        finally:
            done.wait(120)
            engine.close()

    return at_once(*(partial(work, rank) for rank in range(N)))


# ------------------------------------------------------------------------------------------------ simulated


class Simulated(Simulator):
    """Simulator of nodes with a guard each; `cut(t, i, j)` says which messages are lost."""

    def __init__(self, topology, trust, lie, cut):
        super().__init__(topology)
        self.lie, self.cut, self.clipped, self.first, self.heard = lie, cut, {}, None, None
        self.guards = [self._guard(i, trust) for i in range(N)] if math.isfinite(trust) else None

    def _guard(self, i, trust):
        return Guard(trust, lambda j, why: why and self.clipped.setdefault((i, j), []).append(self.t))

    def mix(self, t, tensors, time=None):
        (told,), self.t, W = tensors, t, self.topology.weights(t)
        sent = told.clone()
        self.first = told if self.first is None else self.first
        if self.lie:
            heard = told[LIAR] if self.heard is None else self.heard[LIAR - 1]
            sent[LIAR] = LIES[self.lie](told[LIAR], self.first[LIAR], heard)
        self.heard, mixed = told, told.clone()
        for i in range(N):
            came = [j for j in range(N) if j != i and W[i, j] and not self.cut(t, i, j)]
            rows, weights = {j: sent[j][None, None] for j in came}, [float(W[i, j]) for j in came]
            if self.guards and not (self.lie and i == LIAR):
                rows = self.guards[i].clipped(0, told[i][None, None], rows, weights)
            for weight, row in zip(weights, rows.values(), strict=True):
                mixed[i] += weight * (row[0, 0] - told[i])
        return (mixed,)


def simulated(topology, trust, steps=150, lie=None, cut=lambda t, i, j: False, **how):
    """Return the accuracies of the honest nodes and, by (who, whom), the steps in which a message was clipped."""
    engine = Simulated(qg.topology.parse(topology), trust, lie, cut)
    _, right = train(engine, steps, **how)
    return [one for k, one in enumerate(right) if not (lie and k == LIAR)], engine.clipped


def away(first, last):
    """Cut node `LIAR` off in these steps: it trains alone and comes back."""
    return lambda t, i, j: first <= t <= last and LIAR in (i, j)


def halved(first, last):
    """Cut the network into two halves in these steps."""
    return lambda t, i, j: first <= t <= last and (i < N // 2) != (j < N // 2)


def table_of_liars():
    """Print the honest nodes' accuracy, mean and worst, without and with trust, for each kind of lie."""
    for topology, spread in (("ring:8", "iid"), ("ring:8", "0.1"), ("ring:8", "sorted"), ("complete:8", "iid")):
        for lie in (None, "silent", *LIES):
            cut = away(1, math.inf) if lie == "silent" else away(0, 0)
            cells = []
            for trust in (math.inf, SUGGESTED):
                right, clipped = simulated(topology, trust, 150, lie if lie in LIES else None, cut, spread=spread)
                right = right if lie in LIES else right[:LIAR] + right[LIAR + 1 :]
                wrong = sum(len(at) for (_, there), at in clipped.items() if there != LIAR)
                cells.append(f"{fmean(right):.1f} ({min(right):.1f})" + (f", {wrong} honest clipped" if wrong else ""))
            print(topology, spread, lie or "no liar", *cells, sep=" | ", flush=True)


def table_of_honest_runs(steps=200):
    """Print the highest ratio of a distance to what is usual, undisturbed and if a node is away for 20 steps."""
    ratios, share = [], Trust._share

    def noted(self, j, distance, usual, *further):
        ratios.append(distance / usual if usual and len(self._last) > 1 else 0.0)
        return share(self, j, distance, usual, *further)

    Trust._share = noted
    methods = (("qg-dsgdm-n", 0.05), ("dsgdm-n", 0.05), ("dsgd", 0.1), ("dfedavgm", 0.02), ("dadam", 0.002))
    for algorithm, lr in methods:
        for topology in ("ring:8", "one-peer-exponential:8", "exponential:8", "complete:8"):
            cells = []
            for spread in ("iid", "0.1", "sorted"):
                for cut in (away(0, 0), away(60, 79)):
                    ratios.clear()
                    simulated(topology, 1e6, steps, cut=cut, spread=spread, lr=lr, algorithm=algorithm)
                    cells.append(f"{max(ratios):.1f}")
            print(algorithm, topology, *cells, sep=" | ", flush=True)


def table_of_absences():
    """Print accuracy without and with trust, and the clipped messages, after 150 of 300 steps apart."""
    for topology in ("ring:8", "one-peer-exponential:8", "complete:8"):
        for spread in ("iid", "0.1", "sorted"):
            for name, cut in (("one node away", away(60, 209)), ("two halves", halved(60, 209))):
                cells = []
                for trust in (math.inf, SUGGESTED):
                    right, clipped = simulated(topology, trust, 300, cut=cut, spread=spread)
                    cells.append(f"{fmean(right):.1f} ({min(right):.1f})")
                count, last = sum(map(len, clipped.values())), max(map(max, clipped.values()), default=0)
                print(topology, spread, name, *cells, f"{count} clipped, last at {last}", sep=" | ", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"liars": table_of_liars, "honest": table_of_honest_runs, "absences": table_of_absences}[sys.argv[1]]()
