"""One run on either engine; test processes import this module."""

import torch
from torch.distributed import PrefixStore

import quasiglobal as qg
from quasiglobal.engines.distributed import Distributed, spread

D, SEEDS = 7, (3, 5)


def settings(name, topology):
    """Return the graph, and start, targets and noise that differ per node; D² gets a lazy W, which it needs."""
    graph = qg.topology.parse(f"lazy/{topology}" if name.startswith("d2") else topology)
    generator = torch.Generator().manual_seed(0)
    rows = len(SEEDS) * graph.n
    x0 = torch.randn(rows, D, dtype=torch.float64, generator=generator)
    targets = torch.randn(rows, D, dtype=torch.float64, generator=generator)
    noise = torch.randn(60, rows, D, dtype=torch.float64, generator=generator)
    return graph, x0, targets, noise


def run(name, topology, engine_of, rows_of):
    graph, x0, targets, noise = settings(name, topology)
    engine = engine_of(graph)
    rows = rows_of(engine, graph)

    def gradient(x, t):
        return x - targets[rows] + 0.1 * noise[t - 1][rows]

    return qg.minimize(
        None if "gossip" in name else gradient, x0[rows], name, graph, lambda t: 0.05 if t < 40 else 0.005, 60, 1e-3,
        engine=engine, keep_history=False,
    )


def hosted_rows(engine, graph):
    return torch.tensor([r * graph.n + i for r in range(len(SEEDS)) for i in engine.nodes])


def in_a_process(rank, store, processes, cases, rounded=False):
    results = []
    for k, (name, topology) in enumerate(cases):
        place, engines = PrefixStore(f"case/{k}", store), []

        def engine_of(graph, place=place, engines=engines):
            hosted = spread(graph.n, processes)
            engines.append(Distributed(graph, place, rank, hosted, seeds=SEEDS, shared=5, rounded=rounded, timeout=60))
            return engines[0].connect()

        result = run(name, topology, engine_of, hosted_rows)
        place.set(f"done/{rank}", "1")
        place.wait([f"done/{process}" for process in range(processes)])     # no process exits before all have received
        engines[0].close()
        results.append((hosted_rows_of(rank, processes, topology), result.x, result.state))
    return results


def hosted_rows_of(rank, processes, topology):
    n = qg.topology.parse(topology).n
    return [r * n + i for r in range(len(SEEDS)) for i in spread(n, processes)[rank]]
