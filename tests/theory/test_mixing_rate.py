"""ρ is the mixing rate of the paper's assumption, and limits the momentum."""

import numpy as np
import pytest
import torch
from theory_problems import directed_ring, normal, spread

import quasiglobal as qg

NAMES = ["ring:8", "ring:16", "torus:16", "star:7", "social", "lazy/ring:16", "one-peer-exponential:8"]


def mixed(topology, X):
    """Mean over a period of ‖W X − X̄‖²/n, for each X of a batch."""
    return torch.stack([spread(torch.from_numpy(W) @ X) for W in topology.matrices]).mean(dim=0)


@pytest.mark.parametrize("name", NAMES)
def test_rho_bounds_what_one_mixing_leaves(name):
    """Assumption on W: E_W ‖W X − X̄‖² ≤ (1 − ρ)‖X − X̄‖², tight for the worst X."""
    topology = qg.topology.parse(name)
    X = normal(200, topology.n, 3, seed=1)
    assert (mixed(topology, X) <= (1 - topology.rho) * spread(X) * (1 + 1e-12) + 1e-24).all()

    J = np.full((topology.n, topology.n), 1 / topology.n)
    shrink = np.mean([(W - J).T @ (W - J) for W in topology.matrices], axis=0)
    slowest = torch.from_numpy(np.linalg.eigh(shrink)[1][:, -1:].copy())
    left, kept = float(mixed(topology, slowest)), (1 - topology.rho) * float(spread(slowest))
    assert left == pytest.approx(kept, rel=1e-9, abs=1e-24)


@pytest.mark.parametrize("name", ["ring:16", "torus:16", "social"])
def test_rho_is_one_minus_the_second_singular_value_squared(name):
    """1 − ρ = σ₂(W)², and not σ₂ or λ₂: the norm in the assumption is squared."""
    topology = qg.topology.parse(name)
    second = np.linalg.svd(topology.weights(), compute_uv=False)[1]
    assert topology.rho == pytest.approx(1 - second**2, abs=1e-12)


def test_the_lazy_graph_mixes_less():
    """(I + W)/2, which D² needs, mixes more slowly: σ₂ is 0.975 instead of 0.949 on a ring of 16."""
    ring = qg.topology.ring(16)
    assert ring.rho == pytest.approx(1 - ((1 + 2 * np.cos(np.pi / 8)) / 3) ** 2, abs=1e-12)
    assert ring.lazy().rho == pytest.approx(1 - ((2 + np.cos(np.pi / 8)) / 3) ** 2, abs=1e-12)
    assert ring.lazy().rho < ring.rho


def test_the_theorem_allows_hardly_any_momentum_on_a_ring():
    """β/(1 − β) ≤ ρ/21 gives 0.0047 on a ring of 16, where practice uses 0.9; at most 1/22 on any graph."""
    ring = qg.topology.ring(16)
    assert ring.largest_beta == pytest.approx(0.0047, abs=5e-5)
    assert ring.largest_beta / (1 - ring.largest_beta) == pytest.approx(ring.rho / 21, rel=1e-12)
    assert qg.topology.complete(16).largest_beta == pytest.approx(1 / 22)


def test_one_peer_exponential_mixes_on_average_alone():
    """For n = 8, ρ = 1/3 is the mean over the hops 1, 2, 4. Three consecutive steps reach the exact mean. A hop
    of 4 alone does not contract models of period 4.
    """
    graph = qg.topology.one_peer_exponential(8)
    assert graph.rho == pytest.approx(1 / 3, abs=1e-12)
    product = graph.weights(3) @ graph.weights(2) @ graph.weights(1)
    np.testing.assert_allclose(product, np.full((8, 8), 1 / 8), atol=1e-15)
    one_hop = torch.from_numpy(graph.weights(3))
    X = torch.tensor([1.0, 0, -1, 0] * 2, dtype=torch.float64)[:, None]
    assert torch.equal(one_hop @ X, X)


def test_momentum_far_beyond_the_theorem_can_undo_the_mixing():
    """On a directed ring, doubly stochastic but with complex eigenvalues, quasi-global momentum with β = 0.9
    drives the nodes apart without any gradient; with the theorem's β they reach consensus.
    """
    graph = directed_ring(8)
    x0 = normal(8, 3, seed=2)
    for beta, agree in ((0.9, False), (graph.largest_beta, True)):
        last = qg.minimize(None, x0, f"qg-gossip:beta={beta!r},mu=0.5", graph, lr=1.0, steps=200).x
        assert bool(spread(last) < 1e-6 * spread(x0)) is agree
        assert bool(spread(last) > spread(x0)) is not agree


@pytest.mark.parametrize(("mu", "agree"), [(0.4, False), (0.5, True), (0.9, True)])
def test_a_symmetric_w_needs_memory_for_its_negative_eigenvalues(mu, agree):
    """On a mode of W with eigenvalue λ the characteristic polynomial of quasi-global gossip is
    z² − (λ + μ + (1 − μ)βλ)z + λ(μ + (1 − μ)β), stable for −1 < λ < 1 where (1 + λ)(1 + μ) > −2(1 − μ)βλ.
    The torus of 16 has λ_min = −3/5: β = 0.9 requires μ > 0.46, which the paper's μ = β satisfies.
    """
    graph, beta = qg.topology.torus(16), 0.9
    low = graph.lambda_min
    assert ((1 + low) * (1 + mu) > -2 * (1 - mu) * beta * low) is agree
    x0 = normal(16, 3, seed=3)
    last = qg.minimize(None, x0, f"qg-gossip:beta={beta},mu={mu}", graph, lr=1.0, steps=300).x
    assert bool(spread(last) < 1e-6 * spread(x0)) is agree
    assert bool(spread(last) > spread(x0)) is not agree
