"""Under quasi-global momentum, the nodes' mean follows its own recursion on any graph."""

from functools import cache

import numpy as np
import pytest
import torch
from theory_problems import Quadratics, directed_ring, noisy, normal, run

import quasiglobal as qg

EXACT = 1e-12
"""For float64 numbers up to about 100, whose differences are divided by 0.05; rounding stays below 1e-13.

(Up to 100 on the directed ring, where β = 0.9 is unstable; everywhere else they are of order 1.)
"""


def shuffled_rings(n: int, period: int) -> qg.Topology:
    """A ring with a new order of its nodes at each step."""
    draw = np.random.default_rng(0)
    W = qg.topology.ring(n).weights()
    orders = [draw.permutation(n) for _ in range(period)]
    return qg.topology.from_matrices([W[order][:, order] for order in orders])


GRAPHS = [
    pytest.param(qg.topology.ring(8), id="ring"),
    pytest.param(qg.topology.social(), id="social"),
    pytest.param(qg.topology.one_peer_exponential(8), id="one-peer-exponential"),
    pytest.param(shuffled_rings(8, period=5), id="shuffled rings"),
    pytest.param(directed_ring(8), id="directed ring"),
]
MOMENTA = [(0.9, 0.9), (0.9, 0.5), (0.3, 0.0), (0.0, 0.9)]


@cache
def stochastic_run(topology, beta, mu, lr, steps=30):
    problem = Quadratics.random(topology.n, seed=1)
    x0 = normal(topology.n, 3, seed=2)
    return run(noisy(problem, sigma=0.5), x0, f"qg-dsgdm:beta={beta},mu={mu}", topology, lr, steps)


def decaying(t: int) -> float:
    return 0.05 / (1 + 0.1 * t)


@pytest.mark.parametrize(("beta", "mu"), MOMENTA)
@pytest.mark.parametrize("topology", GRAPHS)
def test_the_mean_follows_the_averaged_recursion(topology, beta, mu):
    """Eq. appendix_our_scheme_averaged_form, stochastic heterogeneous gradients and a decaying η:

    x̄⁺ = x̄ − η(β m̄ + ḡ),  m̄⁺ = μ m̄ + (1 − μ)(x̄ − x̄⁺)/η = (1 − (1 − μ)(1 − β)) m̄ + (1 − μ) ḡ.
    """
    r = stochastic_run(topology, beta, mu, decaying)
    x, m, g = (Z.mean(dim=1) for Z in (r.x, r.m_hat, r.g))
    lr = torch.tensor([decaying(t) for t in range(1, len(g) + 1)], dtype=torch.float64)[:, None]

    assert (x[1:] - (x[:-1] - lr * (beta * m[:-1] + g))).abs().max() < EXACT
    assert (m[1:] - (mu * m[:-1] + (1 - mu) * (x[:-1] - x[1:]) / lr)).abs().max() < EXACT
    assert (m[1:] - ((1 - (1 - mu) * (1 - beta)) * m[:-1] + (1 - mu) * g)).abs().max() < EXACT


@pytest.mark.parametrize(("beta", "mu"), MOMENTA)
@pytest.mark.parametrize("topology", GRAPHS)
def test_the_buffer_has_the_expanded_matrix_form(topology, beta, mu):
    """Eq. appendix_our_scheme_matrix_form, last line, with every node's row:

    M⁺ = (μ I + (1 − μ) β W) M + (1 − μ) W G + (1 − μ)/η (I − W) X.
    """
    lr = 0.05
    r = stochastic_run(topology, beta, mu, lr)
    W = torch.stack([torch.from_numpy(topology.weights(t)) for t in range(1, len(r.g) + 1)])
    x, m = r.x[:-1], r.m_hat[:-1]
    expanded = mu * m + (1 - mu) * (beta * W @ m + W @ r.g + (x - W @ x) / lr)
    assert (r.m_hat[1:] - expanded).abs().max() < EXACT


@pytest.mark.parametrize(("beta", "mu"), MOMENTA)
@pytest.mark.parametrize("topology", GRAPHS)
def test_the_virtual_sequence_is_plain_sgd_with_a_larger_step(topology, beta, mu):
    """Eq. appendix_virtual_sequence: with constant η, x̂ = x̄ − ηβ/((1 − μ)(1 − β)) m̄ starts at x̄⁰ and

    x̂⁺ = x̂ − η/(1 − β) ḡ.  The paper defines x̂ by this recursion; summing e gives the closed form.
    """
    lr = 0.05
    r = stochastic_run(topology, beta, mu, lr)
    x, m, g = (Z.mean(dim=1) for Z in (r.x, r.m_hat, r.g))
    x_hat = x - lr * beta / ((1 - mu) * (1 - beta)) * m

    assert torch.equal(x_hat[0], x[0])
    assert (x_hat[1:] - (x_hat[:-1] - lr / (1 - beta) * g)).abs().max() < EXACT


@pytest.mark.parametrize(("beta", "mu"), MOMENTA)
@pytest.mark.parametrize("topology", GRAPHS)
def test_the_error_of_the_virtual_sequence_forgets_geometrically(topology, beta, mu):
    """Proof of Lemma 'One step error contraction', for e = x̂ − x̄, in the order printed:

    e⁺ = e − ηβ (ḡ/(1 − β) − m̄) = (1 − (1 − μ)(1 − β)) e − ηβ/(1 − β) ḡ.  Both are right as printed.
    """
    lr = 0.05
    r = stochastic_run(topology, beta, mu, lr)
    x, m, g = (Z.mean(dim=1) for Z in (r.x, r.m_hat, r.g))
    x_hat = x[0] - lr / (1 - beta) * torch.cat([torch.zeros_like(g[:1]), g.cumsum(dim=0)])
    e = x_hat - x

    assert (e[1:] - (e[:-1] - lr * beta * (g / (1 - beta) - m[:-1]))).abs().max() < EXACT
    kept = 1 - (1 - mu) * (1 - beta)
    assert (e[1:] - (kept * e[:-1] - lr * beta / (1 - beta) * g)).abs().max() < EXACT


def test_the_virtual_sequence_needs_a_constant_learning_rate():
    """x̂ is defined for constant η: if η decays, its closed form no longer follows SGD."""
    beta, mu = 0.9, 0.5
    r = stochastic_run(qg.topology.ring(8), beta, mu, decaying)
    x, m, g = (Z.mean(dim=1) for Z in (r.x, r.m_hat, r.g))
    lr = torch.tensor([decaying(t) for t in range(1, len(x) + 1)], dtype=torch.float64)[:, None]
    x_hat = x - lr * beta / ((1 - mu) * (1 - beta)) * m
    assert (x_hat[1:] - (x_hat[:-1] - lr[:-1] / (1 - beta) * g)).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:W of .* is not doubly stochastic")
def test_the_averaged_recursion_needs_a_doubly_stochastic_w():
    """If only the rows sum to 1, the mean moves towards the nodes with larger column sums."""
    n = 8
    W = np.full((n, n), 0.5 / n)
    W[:, 0] += 0.5
    r = stochastic_run(qg.topology.from_matrices([W]), 0.9, 0.9, lr=0.05)
    x, m, g = (Z.mean(dim=1) for Z in (r.x, r.m_hat, r.g))
    assert (x[1:] - (x[:-1] - 0.05 * (0.9 * m[:-1] + g))).abs().max() > 1e-3
