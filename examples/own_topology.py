"""Four topologies of twelve nodes: their mixing, their traffic, and the accuracy of a training over them."""

import networkx as nx
import numpy as np
import torch
from torch import nn

import quasiglobal as qg

n = 12
cities = nx.disjoint_union_all([nx.complete_graph(4)] * 3)  # three cities of four nodes, all connected inside,
cities.add_edges_from([(0, 4), (4, 8), (8, 0)])             # and one line from city to city

rng = np.random.default_rng(0)
pairings = []                                               # in each step, every node meets one other at random
for _ in range(20):
    W = np.zeros((n, n))
    for i, j in rng.permutation(n).reshape(-1, 2):
        W[np.ix_([i, j], [i, j])] = 0.5
    pairings.append(W)

topologies = {
    "ring": qg.topology.ring(n),
    "cities": qg.topology.from_graph(cities),
    "random pairs": qg.topology.from_matrices(pairings),
    "complete": qg.topology.complete(n),
}
print(f"{'topology':<13} {'rho':>5} {'received models per step':>25} {'accuracy':>9} {'worst node':>11}")
for name, topology in topologies.items():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    task = qg.Task(net, nn.functional.cross_entropy, qg.data.load("digits"))
    last = qg.train(task, "qg-dsgdm-n", topology, epochs=15, lr=0.05, alpha=0.1).records[-1]
    steps = range(1, topology.period + 1)
    received = np.mean([len(topology.neighbours(i, t)) for t in steps for i in range(n)])
    print(f"{name:<13} {topology.rho:>5.2f} {received:>25.1f} {last['accuracy']:>9.2f} {last['accuracy_worst']:>11.2f}")
