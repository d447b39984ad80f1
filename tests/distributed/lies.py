"""Digits on nodes that average models over real edges, in one process each or in threads; one of them may lie."""

import math
import threading

import torch
from sklearn.datasets import load_digits
from torch.distributed import HashStore

import quasiglobal as qg
from quasiglobal.engines.distributed import Distributed

N, LIAR, HIDDEN, BATCH, TESTED = 8, 3, 64, 32, 400

SHAPES = [(HIDDEN, 64), (HIDDEN,), (10, HIDDEN), (10,)]


class Liar(Distributed):
    """A process that sends something else than its model; `kind` names it."""

    kind = "huge"
    first = None

    def _buffer(self, rows):
        told = super()._buffer(rows)
        self.first = told.clone() if self.first is None else self.first
        return LIES[self.kind](told, self)

    def _receive(self, *message):
        self.heard = super()._receive(*message)
        return self.heard


class Interrupted(Distributed):
    """During 20 steps nothing reaches or leaves node `LIAR`, which trains on alone and comes back."""

    away = range(40, 60)

    def _receive(self, moment, *message):
        received = super()._receive(moment, *message)
        cut = (received if self.rank == LIAR else [LIAR]) if moment[0] in self.away else ()
        return {there: rows for there, rows in received.items() if there not in cut}


LIES = {
    "huge": lambda told, liar: torch.full_like(told, 1e30),
    "opposite": lambda told, liar: -told,
    "noise": lambda told, liar: torch.randn(told.shape, dtype=told.dtype),
    "zeros": lambda told, liar: torch.zeros_like(told),
    "stale": lambda told, liar: liar.first,
    "copied": lambda told, liar: next(iter(getattr(liar, "heard", {}).values()), told).clone(),
}
"""The model of a neighbour's last message is "copied"; "stale" is the first one, for ever."""


def network(x, inputs):
    parts = torch.split(x, [math.prod(shape) for shape in SHAPES])
    a, b, c, d = (part.view(shape) for part, shape in zip(parts, SHAPES, strict=True))
    return torch.relu(inputs @ a.T + b) @ c.T + d


def digits(spread):
    """Return the examples of each node, sorted by label or in turn, and those of the test."""
    inputs, labels = load_digits(return_X_y=True)
    inputs, labels = torch.tensor((inputs / 16 - 0.3) / 0.4), torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[:TESTED], order[TESTED:]
    rest = rest[torch.argsort(labels[rest], stable=True)] if spread == "sorted" else rest
    parts = rest.tensor_split(N) if spread == "sorted" else [rest[k::N] for k in range(N)]
    return [(inputs[part], labels[part]) for part in parts], (inputs[test], labels[test])


def start():
    generator = torch.Generator().manual_seed(1)
    return torch.cat([
        (torch.randn(shape, generator=generator, dtype=torch.float64) * (len(shape) > 1) / shape[-1] ** 0.5).flatten()
        for shape in SHAPES
    ])[None]


def train(engine, steps, spread="iid", lr=0.05, algorithm="qg-dsgdm-n"):
    """Train the engine's node; return its model, its accuracy in percent, and the clipped messages of its edges."""
    (node,) = engine.nodes
    parts, (inputs, labels) = digits(spread)
    x, y = parts[node]
    generator = torch.Generator().manual_seed(node)

    def gradient(at, t):
        chosen = torch.randint(len(y), (BATCH,), generator=generator)
        with torch.enable_grad():
            row = at[0].detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(network(row, x[chosen]), y[chosen])
            return torch.autograd.grad(loss, row)[0][None]

    rate = lambda t: lr if t <= 0.75 * steps else lr / 10  # noqa: E731
    result = qg.minimize(
        gradient, start(), algorithm, engine.topology, rate, steps, 1e-4, engine=engine, keep_history=False,
    )
    right = (network(result.x[0], inputs).argmax(dim=1) == labels).double().mean()
    clipped = {there: one["clipped"] for there, one in engine.accounts().items() if one["clipped"]}
    return result.x, 100 * float(right), clipped


def in_threads(topology, trust, steps, lie=None, honest=Distributed, **how):
    """Train N nodes in threads of this process, whose edges are real; return their results, None for the liar's."""
    store, results, done = HashStore(), [None] * N, threading.Barrier(N)

    def work(rank):
        kind = honest if lie is None or rank != LIAR else Liar
        graph = qg.topology.parse(topology)
        engine = kind(graph, store, rank, [(k,) for k in range(N)], timeout=60, trust=trust)
        engine.kind = lie
        try:
            answer = train(engine.connect(), steps, **how)
            results[rank] = None if kind is Liar else answer
        except Exception as error:
            results[rank] = error
        finally:
            done.wait(120)
            engine.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def table(steps=150, ratios=(math.inf, 8.0, 4.0)):
    """Print the honest nodes' accuracy in percent, mean and worst, with one liar of each kind and each ratio."""
    for topology in ("ring:8", "complete:8"):
        for lie in (None, *LIES):
            cells = []
            for trust in ratios if lie else ratios[:1]:
                right = [result[1] for result in in_threads(topology, trust, steps, lie) if result]
                cells.append(f"trust {trust:g}: {sum(right) / len(right):.1f} ({min(right):.1f})")
            print(topology, lie or "no liar", *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    table()
