"""One run on either engine; test processes import this module."""

import networkx as nx
import torch
from torch.distributed import PrefixStore

import quasiglobal as qg
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.draws import Faults
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.peers.rendezvous import spread
from quasiglobal.peers.sites import SiteOpener
from quasiglobal.topology.parsing import given_weights

D, SEEDS, DROP = 11, (3, 5), 0.3


def graph_of(topology):
    """Return the graph of a text; ring:3@5,1,2 gives the nodes weights."""
    text, _, weights = topology.partition("@")
    graph = qg.topology.parse(text)
    return graph.weighted(given_weights(weights)) if weights else graph


def settings(name, topology):
    """Return the graph, and start, targets and noise that differ per node; D² gets a lazy W, RelaySGD a chain."""
    graph = graph_of(f"lazy/{topology}" if name.startswith("d2") else topology)
    if name.startswith("relaysgd") and not topology.startswith("double-trees"):
        graph = qg.topology.from_graph(nx.path_graph(graph.n), name=f"chain:{graph.n}")
    if name.startswith("lt-admm") and not graph.is_symmetric:
        graph = qg.topology.ring(graph.n)
    generator = torch.Generator().manual_seed(0)
    rows = len(SEEDS) * graph.n
    x0 = torch.randn(rows, D, dtype=torch.float64, generator=generator)
    targets = torch.randn(rows, D, dtype=torch.float64, generator=generator)
    noise = torch.randn(60, rows, D, dtype=torch.float64, generator=generator)
    return graph, x0, targets, noise


class Lossy(Distributed):
    """One node per process; it ignores the messages that the simulator loses with probability `DROP`."""

    def _receive(self, moment, *message):
        received, (i,) = super()._receive(moment, *message), self.nodes
        came = Faults(drop=DROP).arrived(torch.tensor(self.seeds), torch.tensor(moment[0]), self.topology.n)[0, i]
        return {there: rows for there, rows in received.items() if came[there]}


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
    return torch.tensor([r * graph.n + i for r in range(len(engine.seeds)) for i in engine.nodes])


def in_a_process(
    rank, store, processes, cases, rounded=False, kind=Distributed, seeds=SEEDS, wire=None, shared=5, sites=None
):
    """`sites`: the folder of each process's site, for edges over TLS."""
    results = []
    for k, (name, topology) in enumerate(cases):
        place, engines = PrefixStore(f"case/{k}", store), []

        def engine_of(graph, place=place, engines=engines):
            hosted = spread(graph.n, processes)
            how = {"seeds": seeds, "shared": shared, "rounded": rounded, "wire": wire, "timeout": 60}
            way = place if sites is None else SiteOpener(SiteFolder(sites[rank]))
            engines.append(kind(graph, way, rank, hosted, **how))
            return engines[0].connect()

        result = run(name, topology, engine_of, hosted_rows)
        place.set(f"done/{rank}", "1")
        place.wait([f"done/{process}" for process in range(processes)])     # no process exits before all have received
        engines[0].close()
        results.append((hosted_rows_of(rank, processes, topology, len(seeds)), result.x, result.state))
    return results


def hosted_rows_of(rank, processes, topology, runs):
    n = graph_of(topology).n
    return [r * n + i for r in range(runs) for i in spread(n, processes)[rank]]


class SmallFirst(qg.Algorithm):
    """Mixes a number of each node before its model."""

    def init(self, x):
        return {"w": 1 + x[:, :1].abs()}

    def step(self, x, g, state, node):
        w = node.mix(state["w"])
        return node.mix(x - node.lr * g / w), {"w": w}


class Widths(SmallFirst):
    """Mixes a number and a model in one message."""

    def step(self, x, g, state, node):
        w, x = node.mix(state["w"], x - node.lr * g / state["w"])
        return x, {"w": w}


class Growing(qg.Algorithm):
    """Sends a model, then nine."""

    def step(self, x, g, state, node):
        x = node.mix(x - node.lr * g)
        return sum(node.mix(*(x * k for k in range(1, 10)))) / 45, state


class EdgesLater(qg.Algorithm):
    """Mixes models, then exchanges them along each edge."""

    keeps_mean = False

    def step(self, x, g, state, node):
        x = node.mix(x - node.lr * g)
        came, there = node.exchange(x[:, None])
        return x + 0.1 * (came - x[:, None] * there).sum(dim=1) / node.edges.degree, state


class Pushing(qg.Algorithm):
    """Pushes models, which on a doubly stochastic graph is an average."""

    def step(self, x, g, state, node):
        return node.push(x - node.lr * g), state
