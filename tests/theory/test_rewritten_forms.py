"""Equivalent forms of the updates, from the appendices that compare the methods."""

from functools import cache

import pytest
import torch
from theory_problems import Quadratics, noisy, normal

import quasiglobal as qg

EXACT = 1e-12
"""For float64 iterates of order 1; a false identity is wrong by 1e-3 or more."""

GRAPHS = [
    pytest.param(qg.topology.parse(name), id=name)
    for name in ("lazy/ring:8", "social", "one-peer-exponential:8")
]
D2_ON_PURPOSE = pytest.mark.filterwarnings("ignore:D2 needs")
"""The identities of D² are algebra: they hold on the social network too, where D² may diverge."""


def stage_wise(t: int) -> float:
    """A learning rate that drifts, and decays by 10 in the middle."""
    return (0.1 + 0.002 * t) * (0.1 if t > 10 else 1.0)


@cache
def history(name, topology, steps=20, lr=stage_wise):
    """The iterates X(1), X(2), … and the stochastic gradients at them, and W(1), W(2), …"""
    gradient = noisy(Quadratics.random(topology.n, seed=1), sigma=0.3)
    X = qg.minimize(gradient, normal(topology.n, 3, seed=2), name, topology, lr=lr, steps=steps).history
    G = torch.stack([gradient(x, t) for t, x in enumerate(X[:-1], start=1)])
    W = torch.stack([torch.from_numpy(topology.weights(t)) for t in range(1, steps + 1)])
    return X, G, W


def rates(steps=20):
    return torch.tensor([stage_wise(t) for t in range(1, steps + 1)], dtype=torch.float64)[:, None, None]


def worst(actual, expected):
    return (actual - expected).abs().max()


@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize("beta", [0.3, 0.9])
def test_quasi_global_momentum_without_memory_extrapolates(topology, beta):
    """Appendix 'Comparison with D² and gradient tracking': with μ = 0, and r = β η(t)/η(t−1),

    X⁺ = W((1 + r) X − r X₋ − η G).  The first step is DSGD's.
    """
    X, G, W = history(f"qg-dsgdm:beta={beta},mu=0", topology)
    lr = rates()
    ratio = beta * lr[1:] / lr[:-1]
    expected = W[1:] @ ((1 + ratio) * X[1:-1] - ratio * X[:-2] - lr[1:] * G[1:])
    assert worst(X[1], W[0] @ (X[0] - lr[0] * G[0])) < EXACT
    assert worst(X[2:], expected) < EXACT
    without_ratio = W[1:] @ ((1 + beta) * X[1:-1] - beta * X[:-2] - lr[1:] * G[1:])
    assert worst(X[2:], without_ratio) > 1e-3


@D2_ON_PURPOSE
@pytest.mark.parametrize("topology", GRAPHS)
def test_d2_in_its_two_forms(topology):
    """W(2X − X₋ − η(G − G₋)) = W(X − η((X₋ − X)/η + G − G₋)), both with the η of the step itself."""
    X, G, W = history("d2", topology)
    lr = rates()
    assert worst(X[1], W[0] @ (X[0] - lr[0] * G[0])) < EXACT
    assert worst(X[2:], W[1:] @ (2 * X[1:-1] - X[:-2] - lr[1:] * (G[1:] - G[:-1]))) < EXACT
    rewritten = W[1:] @ (X[1:-1] - lr[1:] * ((X[:-2] - X[1:-1]) / lr[1:] + G[1:] - G[:-1]))
    assert worst(X[2:], rewritten) < EXACT


@D2_ON_PURPOSE
@pytest.mark.parametrize("topology", GRAPHS)
def test_d2_plus_divides_a_movement_by_the_learning_rate_that_made_it(topology):
    """D²₊: W(X − η(t)((X₋ − X)/η(t−1) + G − G₋))."""
    X, G, W = history("d2+", topology)
    lr = rates()
    moved = (X[:-2] - X[1:-1]) / lr[:-1]
    assert worst(X[2:], W[1:] @ (X[1:-1] - lr[1:] * (moved + G[1:] - G[:-1]))) < EXACT


@D2_ON_PURPOSE
def test_d2_and_d2_plus_part_only_where_the_learning_rate_changes():
    topology = qg.topology.parse("lazy/ring:8")
    constant = (history(name, topology, lr=0.1)[0] for name in ("d2", "d2+"))
    changing = (history(name, topology)[0] for name in ("d2", "d2+"))
    assert worst(*constant) < EXACT
    assert worst(*changing) > 1e-3


LR, BETA, MU = 0.1, 0.8, 0.3


def reorganized_dmsgd(option, gradient, x0, W, steps, scale=1 / LR, at_consensus=False):
    """Algorithm 'Re-organized formulation of DMSGD', line by line, for a constant η.

    Its x^(t − ½) is the original's model x^(t), and its x^(t) the original's consensus v^(t). So it starts
    from x^(½) = x0 and x^(1) = W x0, and its m̂ is minus the original's.

    As printed its m̂ is a difference of models (scale = 1), which line 4 then multiplies by η: the original
    does not. The unified form below it divides by η (scale = 1/η), and that is the original.
    """
    half, x, m_hat = x0, W @ x0, torch.zeros_like(x0)
    models, buffers, points = [half], [m_hat], [x]
    for t in range(1, steps + 1):
        g = gradient(x if at_consensus else half, t)
        new_half = (x if option == 1 else half) - LR * (BETA * m_hat + g)
        new_x = W @ new_half
        m_hat = scale * (MU * (half - new_half) + (1 - MU) * (x - new_x))
        half, x = new_half, new_x
        models.append(half)
        buffers.append(m_hat)
        points.append(x)
    return torch.stack(models), torch.stack(buffers), torch.stack(points)


@pytest.fixture(scope="module")
def dmsgd_problem():
    topology = qg.topology.ring(8)
    gradient = noisy(Quadratics.random(8, seed=3), sigma=0.3)
    return topology, gradient, normal(8, 3, seed=4), torch.from_numpy(topology.weights())


@pytest.mark.parametrize("option", [1, 2])
class TestDMSGD:
    """Appendix 'Difference between DMSGD and QG-DSGDm'. The original's m̂^(1) needs an x^(0) that is not
    given; with m̂^(1) = 0, as in the re-organised form, the two are the same method.
    """

    @pytest.fixture
    def original(self, option, dmsgd_problem):
        topology, gradient, x0, _ = dmsgd_problem
        name = f"{'dmsgd' if option == 1 else 'dmsgd-2'}:beta={BETA},mu={MU}"
        return qg.minimize(gradient, x0, name, topology, lr=LR, steps=30).history

    def test_the_original_is_the_reorganized_form_with_m_divided_by_lr(self, option, dmsgd_problem, original):
        _, gradient, x0, W = dmsgd_problem
        models, _, _ = reorganized_dmsgd(option, gradient, x0, W, 30)
        assert worst(original, models) < EXACT

    def test_the_reorganized_form_as_printed_is_another_method(self, option, dmsgd_problem, original):
        """Without the 1/η its momentum counts η times as much."""
        _, gradient, x0, W = dmsgd_problem
        models, _, _ = reorganized_dmsgd(option, gradient, x0, W, 30, scale=1.0)
        assert worst(original, models) > 1e-3

    def test_the_unified_algorithm_takes_its_gradients_elsewhere(self, option, dmsgd_problem, original):
        """Algorithm 'DMSGD v.s. QG-DSGDm' evaluates g at the consensus x^(t), DMSGD at x^(t − ½): the text's
        'slightly abuse the notations' is a different trajectory.
        """
        _, gradient, x0, W = dmsgd_problem
        models, _, _ = reorganized_dmsgd(option, gradient, x0, W, 30, at_consensus=True)
        assert worst(original, models) > 1e-3

    def test_the_closed_form_of_the_buffer(self, option, dmsgd_problem, original):
        """With D^(t) = (x^(t) − x^(t+1))/η of the consensus (the printed 1 − ω is 1 − μ):

        I:  m̂^(t) = μ(β m̂^(t−1) + g^(t) + D^(t−1) − β m̂^(t−2) − g^(t−1)) + (1 − μ) D^(t), from t = 2 on;
        II: m̂^(t) = μ(β m̂^(t−1) + g^(t)) + (1 − μ) D^(t).
        The buffer is read off the library's iterates: m̂^(t−1) = (start − x^(t + ½))/(ηβ) − g^(t)/β.
        """
        _, gradient, _, W = dmsgd_problem
        g = torch.stack([gradient(x, t) for t, x in enumerate(original[:-1], start=1)])
        v = W @ original
        start = v if option == 1 else original
        m_hat = ((start[:-1] - original[1:]) / LR - g) / BETA       # m_hat[t] is the paper's m̂^(t)
        D = (v[:-1] - v[1:]) / LR                                   # D[t − 1] is D^(t)
        own = BETA * m_hat + g
        assert m_hat[0].abs().max() < EXACT
        if option == 1:
            expected = MU * (own[1:-1] + D[:-2] - own[:-2]) + (1 - MU) * D[1:-1]
            assert worst(m_hat[2:], expected) < EXACT
        else:
            expected = MU * own[:-1] + (1 - MU) * D[:-1]
            assert worst(m_hat[1:], expected) < EXACT
