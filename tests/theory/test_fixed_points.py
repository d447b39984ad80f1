"""Fixed points of the methods on heterogeneous quadratics with exact gradients, on a ring of 16."""

from functools import cache

import pytest
import torch
from theory_problems import Quadratics

import quasiglobal as qg

PROBLEM = Quadratics.random(16, seed=1, low=0.5, high=1.0)
RING, LAZY = qg.topology.ring(16), qg.topology.parse("lazy/ring:16")
BETA = 0.9
START = torch.zeros(3, dtype=torch.float64)


@cache
def at_rest(name, topology=RING, lr=0.05, steps=2000):
    """Run to the fixed point: the error shrinks by a factor of 0.98 or less per step, so 2000 steps leave rounding."""
    return qg.minimize(PROBLEM.gradient, START, name, topology, lr=lr, steps=steps)


def dsgd_rests_at(lr, topology=RING):
    """DSGD's fixed point: the solution of x = W(x − lr H(x − c)), that is of (I − W(I − lr H)) x = W lr H c."""
    n, d = PROBLEM.c.shape
    W = torch.kron(torch.from_numpy(topology.weights()), torch.eye(d, dtype=torch.float64))
    lr_H, eye = lr * torch.block_diag(*PROBLEM.H), torch.eye(n * d, dtype=torch.float64)
    return torch.linalg.solve(eye - W @ (eye - lr_H), W @ lr_H @ PROBLEM.c.flatten()).reshape(n, d)


@pytest.mark.parametrize(
    ("name", "topology", "lr", "steps"),
    [
        ("dsgd-gt", RING, 0.05, 2000),
        ("d2", LAZY, 0.05, 2000),
        pytest.param("d2+", LAZY, 0.05, 2000, marks=pytest.mark.slow),
        # With momentum on the tracker, a larger lr converges more slowly.
        pytest.param("dsgdm-gt", RING, 0.02, 2500, marks=pytest.mark.slow),
        ("dsgdm-n-gt", RING, 0.02, 2500),
    ],
)
def test_bias_correcting_methods_reach_the_exact_minimiser_at_every_node(name, topology, lr, steps):
    """Tolerance 1e-7; rounding accumulates to about 1e-12."""
    x = at_rest(name, topology, lr, steps).x
    assert (x - PROBLEM.minimiser).abs().max() < 1e-7


STEP_OF_DSGD = {
    "dsgd": 1.0,
    f"dsgdm:beta={BETA}": 1 / (1 - BETA),
    f"dsgdm-n:beta={BETA}": 1 / (1 - BETA),
    f"qg-dsgdm:beta={BETA}": 1.0,
    f"qg-dsgdm:beta={BETA},mu=0": 1.0,
    f"qg-dsgdm:beta={BETA},mu=0.5": 1.0,
    f"qg-dsgdm-n:beta={BETA}": 1 + BETA,
    f"qg-dsgdm-n:beta={BETA},mu=0.5": 1 + BETA,
}
"""Each method has the fixed point of DSGD with this many times the learning rate.

There, local momentum is m = g/(1 − β), and both forms step by it: m, and g + βm = g(1 + β/(1 − β)) = g/(1 − β).
Quasi-global momentum is m̂ = 0, since nothing moves: the step is g, or (1 + β)g in Nesterov's form.
"""


@pytest.mark.parametrize(("name", "factor"), [
    pytest.param(*item, marks=pytest.mark.slow if "mu=0.5" in item[0] or "qg-dsgdm:" in item[0] else ())
    for item in STEP_OF_DSGD.items()
])
def test_the_others_rest_where_dsgd_with_a_larger_step_does(name, factor):
    """Tolerance 1e-9 against a linear solve. The nodes reach neither the minimiser nor consensus."""
    x = at_rest(name).x
    assert (x - dsgd_rests_at(0.05 * factor)).abs().max() < 1e-9
    assert (x - PROBLEM.minimiser).abs().amax(dim=1).min() > 1e-3
    assert (x - x.mean(dim=0)).abs().amax(dim=1).min() > 1e-3
    assert (x.mean(dim=0) - PROBLEM.minimiser).abs().max() > 1e-3


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if "mu=" in name else ())
    for name in STEP_OF_DSGD if name.startswith("qg-")
])
def test_quasi_global_momentum_at_rest_is_zero(name):
    assert at_rest(name).state["m_hat"].abs().max() < 1e-9


@pytest.mark.parametrize("name", ["dsgdm", "dsgdm-n"])
def test_local_momentum_at_rest_is_the_nodes_own_pull(name):
    """m = g/(1 − β): each node's buffer keeps the heterogeneity permanently."""
    result = at_rest(f"{name}:beta={BETA}")
    m = result.state["m"]
    assert (m - PROBLEM.gradient(result.x) / (1 - BETA)).abs().max() < 1e-9
    assert m.abs().amax(dim=1).min() > 1


def test_the_less_biased_of_two_at_the_same_learning_rate_is_quasi_global():
    """At β = 0.9 the fixed points are those of DSGD with 10 times the step (local), 1 or 1.9 times (quasi-global)."""
    bias = {name: (at_rest(name).x - PROBLEM.minimiser).square().sum() for name in STEP_OF_DSGD}
    assert bias[f"qg-dsgdm:beta={BETA}"] < 0.5 * bias[f"dsgdm:beta={BETA}"]
    assert bias[f"qg-dsgdm-n:beta={BETA}"] < 0.5 * bias[f"dsgdm-n:beta={BETA}"]


def test_without_heterogeneity_everybody_finds_the_minimiser():
    """The bias comes from heterogeneity: with one function for all nodes, the same methods reach its minimiser."""
    same = Quadratics.random(16, seed=2, low=0.5, high=1.0, apart=0)
    for name in ("dsgd", f"dsgdm:beta={BETA}", f"qg-dsgdm:beta={BETA}", f"qg-dsgdm-n:beta={BETA}"):
        x = qg.minimize(same.gradient, START + 1, name, RING, lr=0.05, steps=1500).x
        assert (x - same.minimiser).abs().max() < 1e-9
