"""Fixed points of the methods with messages per edge or pushes, on heterogeneous quadratics with exact gradients."""

import networkx as nx
import numpy as np
import pytest
import torch
from theory_problems import Quadratics

import quasiglobal as qg
from quasiglobal.engines.simulator import Simulator
from quasiglobal.topology.mixing import column_stochastic

N = 8
PROBLEM = Quadratics.random(N, seed=1, low=0.5, high=1.0)
START = torch.zeros(3, dtype=torch.float64)
RING, TREE = qg.topology.ring(N), qg.topology.from_graph(nx.full_rary_tree(2, N))
LINKS = nx.to_numpy_array(nx.DiGraph([(i, (i + 1) % N) for i in range(N)] + [(0, 3), (1, 5), (5, 2)])).T + np.eye(N)
DIRECTED = qg.topology.from_matrices([LINKS / LINKS.sum(axis=1, keepdims=True)])


@pytest.mark.parametrize(
    ("name", "graph", "lr", "steps", "drop"),
    [
        ("relaysgd", TREE, 0.1, 500, 0.0),
        pytest.param("relaysgd:fill=start,beta=0.5", TREE, 0.05, 600, 0.0, marks=pytest.mark.slow),
        pytest.param("lt-admm:tau=1,beta_a=0.2", RING, 0.1, 700, 0.0, marks=pytest.mark.slow),
        ("lt-admm:tau=1,beta_a=0.2", RING, 0.1, 700, 0.3),
        pytest.param("lt-admm:tau=2,beta_a=0.1,beta=0.5", TREE, 0.1, 1000, 0.3, marks=pytest.mark.slow),
        ("push-diging", DIRECTED, 0.1, 500, 0.0),
        ("push-diging:sums=true,beta=0.5", DIRECTED, 0.05, 800, 0.3),
        pytest.param("ab:beta=0.5", DIRECTED, 0.1, 500, 0.0, marks=pytest.mark.slow),
    ],
)
def test_these_methods_reach_the_exact_minimiser_at_every_node(name, graph, lr, steps, drop):
    """Tolerance 1e-7, as for the methods without channels; a biased method is off by more than 1e-3."""
    engine = Simulator(graph, drop=drop)
    x = qg.minimize(PROBLEM.gradient, START, name, graph, lr, steps, engine=engine, keep_history=False).x
    assert (x - PROBLEM.minimiser).abs().max() < 1e-7


@pytest.mark.parametrize(
    ("name", "wire", "steps"),
    [
        ("beer:gamma=0.4", "topk:0.4", 700),
        pytest.param("motef:gamma=0.4,lam=0.3", "sign", 1200, marks=pytest.mark.slow),
        pytest.param("motef:gamma=0.3,lam=0.5", "qsgd:4", 1500, marks=pytest.mark.slow),
    ],
)
def test_tracking_reaches_the_exact_minimiser_with_compressed_messages(name, wire, steps):
    """Tolerance 1e-7, as above; gossip of compressed models with the same wire stays far away."""
    x, biased = (
        qg.minimize(PROBLEM.gradient, START, one, RING, 0.05, steps, wire=wire, keep_history=False).x
        for one in (name, "choco:gamma=0.3")
    )
    assert (x - PROBLEM.minimiser).abs().max() < 1e-7
    assert (biased - PROBLEM.minimiser).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "times"), [("sgp", 1), ("qg-sgp:nesterov=false", 1), pytest.param("qg-sgp", 1.9, marks=pytest.mark.slow)]
)
def test_gradient_push_rests_where_its_weights_are_corrected(name, times):
    """X = P(X − η H(X/w − c)), where w = P w sums to n: a linear system. Tolerance 1e-9, of its solution.

    At rest m̂ = 0, so quasi-global momentum changes nothing; Nesterov's form multiplies η by 1 + β.
    """
    lr, d = 0.05 * times, PROBLEM.c.shape[1]
    P = torch.from_numpy(column_stochastic(DIRECTED.weights()))
    w = torch.linalg.matrix_power(P, 1000).sum(dim=1, keepdim=True)
    H, eye = torch.block_diag(*PROBLEM.H), torch.eye(N * d, dtype=torch.float64)
    push = torch.kron(P, torch.eye(d, dtype=torch.float64))
    moved = eye - lr * H / w.repeat_interleave(d, dim=0).flatten()
    X = torch.linalg.solve(eye - push @ moved, push @ (lr * H @ PROBLEM.c.flatten())).reshape(N, d)
    result = qg.minimize(PROBLEM.gradient, START, name, DIRECTED, lr / times, 800, keep_history=False)
    assert (result.x - X / w).abs().max() < 1e-9
    assert (result.state["w"] - w).abs().max() < 1e-12
    assert (result.x - PROBLEM.minimiser).abs().max() > 1e-3
