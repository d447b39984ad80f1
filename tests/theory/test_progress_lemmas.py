"""The appendix's progress lemmas for one step, and its convergence theorem.

Exact gradients here (σ = 0); test_noise_terms.py has the σ² terms. e = x̂ − x̄ and η̃ = η/(1 − β).

All hold as printed, with these remarks on the text.
(1) The proof of 'Strongly-convex one step progress' ends with a factor 1 − 2Lη̃ ≥ 1/2 where the lemma has 3/4,
    and it splits ‖ḡ‖² without a cross term. The lemma is still correct: with
    −2⟨ḡ, e⟩ ≤ ‖ḡ‖²/(6L) + 6L‖e‖² and ‖ḡ‖² ≤ 3L² spread(X) + (3/2)·2L(f(x̄) − f*), the remainder is exactly
    −2 + 2·(1/6 + 1/4)·(3/2) = −3/4 of η̃(f(x̄) − f*), with 8 and 4.25 ≤ 5 for the other two.
(2) The potential Φ of the theorem's proof has f(x̄) where the lemma that it sums has f(x̂).
(3) The theorem in the appendix prints E‖∇f‖ where the proof (and the main text) have E‖∇f‖².
"""

from functools import cache
from itertools import product

import pytest
import torch
from theory_problems import (
    Cosines,
    Quadratics,
    QuasiGlobal,
    Run,
    gradient_at,
    normal,
    spread,
    squared,
    zeta_squared,
)

import quasiglobal as qg

ROUNDING = 1e-12
"""Absolute tolerance for terms of order 1e-2 to 1e3; the bounds have far more slack."""



def graphs(*names):
    return [pytest.param(qg.topology.parse(name), id=name) for name in names]


class Constants(QuasiGlobal):
    """A graph, an objective, β, μ, and a learning rate, by default the largest that the lemmas allow."""

    def __init__(self, topology, problem, beta, mu, lr=None):
        self.topology, self.problem, self.beta, self.mu = topology, problem, beta, mu
        self.lr = (1 - beta) / (4 * problem.smoothness) if lr is None else lr
        self.rate = self.lr / (1 - beta)

    def error(self, r: Run) -> torch.Tensor:
        """e = x̂ − x̄ before and after each step, [T + 1, d]."""
        return -self.lr * self.beta / ((1 - self.mu) * (1 - self.beta)) * r.m_hat.mean(dim=1)

    def buffer_for(self, error: torch.Tensor) -> torch.Tensor:
        """The buffer, equal at all nodes, that gives this error e."""
        m = -(1 - self.mu) * (1 - self.beta) / (self.lr * self.beta) * error
        return m.expand(self.topology.n, -1)


def non_convex_progress(k: Constants, r: Run):
    """Lemma 'Non-convex one step progress', η ≤ (1 − β)/(4L):

    f(x̂⁺) ≤ f(x̂) − (η̃/4)‖∇f(x̄)‖² − (η̃/4)‖ḡ‖² + (3L²η̃/2)‖e‖² + 3L²η̃ spread(X).  (The proof has L²η̃.)
    """
    f, L, x_bar, e = k.problem.value, k.problem.smoothness, r.x.mean(dim=1), k.error(r)
    x_hat = x_bar + e
    gained = squared(gradient_at(k.problem, x_bar[:-1])) + squared(r.g.mean(dim=1))
    return f(x_hat[1:]), {
        "before": f(x_hat[:-1]),
        "gained": -k.rate / 4 * gained,
        "error": 1.5 * L**2 * k.rate * squared(e[:-1]),
        "models": 3 * L**2 * k.rate * spread(r.x[:-1]),
    }


def strongly_convex_progress(k: Constants, r: Run):
    """Lemma 'Strongly-convex one step progress', η ≤ (1 − β)/(4L), f_i strongly convex with constant s:

    ‖x̂⁺ − x*‖² ≤ (1 − sη̃/2)‖x̂ − x*‖² − (3η̃/4)(f(x̄) − f*) + 8Lη̃‖e‖² + 5Lη̃ spread(X).
    The paper writes μ for s, the same symbol as for the momentum.
    """
    L, x_bar, e = k.problem.smoothness, r.x.mean(dim=1), k.error(r)
    distance = squared(x_bar + e - k.problem.minimiser)
    return distance[1:], {
        "before": (1 - k.problem.strong_convexity * k.rate / 2) * distance[:-1],
        "gained": -0.75 * k.rate * (k.problem.value(x_bar[:-1]) - k.problem.lowest),
        "error": 8 * L * k.rate * squared(e[:-1]),
        "models": 5 * L * k.rate * spread(r.x[:-1]),
    }


def error_contraction(k: Constants, r: Run):
    """Lemma 'One step error contraction', any η and β:

    ‖e⁺‖² ≤ (1 − (1 − μ)(1 − β))‖e‖² + 2η̃²β²/((1 − β)(1 − μ)) ‖ḡ‖².
    """
    e, slow = squared(k.error(r)), (1 - k.mu) * (1 - k.beta)
    return e[1:], {
        "error": (1 - slow) * e[:-1],
        "gradient": 2 * k.rate**2 * k.beta**2 / slow * squared(r.g.mean(dim=1)),
    }


def total(terms):
    return sum(terms.values())


@cache
def trajectories(topology, beta, mu) -> list[tuple[Constants, Run]]:
    runs = []
    for seed, family in product((0, 1), (Quadratics, Cosines)):
        k = Constants(topology, family.random(topology.n, seed=seed), beta, mu)
        for x_scale, m_scale in ((0.0, 0.0), (2.0, 3.0)):
            x0 = x_scale * normal(topology.n, 3, seed=seed + 2)
            m_hat = m_scale * normal(topology.n, 3, seed=seed + 4)
            runs.append((k, k.run(x0, m_hat, steps=20)))
    return runs


@pytest.mark.parametrize(("beta", "mu"), [(0.3, 0.0), (0.9, 0.9), (0.5, 0.9)])
@pytest.mark.parametrize("topology", graphs("ring:8", "social", "one-peer-exponential:8"))
@pytest.mark.parametrize("lemma", [non_convex_progress, strongly_convex_progress, error_contraction])
def test_every_step_of_a_trajectory_obeys_the_lemma(lemma, topology, beta, mu):
    """At the lemma's largest learning rate, on quadratics and, unless f must be convex, on cosines."""
    for k, r in trajectories(topology, beta, mu):
        if lemma is strongly_convex_progress and isinstance(k.problem, Cosines):
            continue
        left, terms = lemma(k, r)
        assert (left <= total(terms) + ROUNDING).all()


@pytest.mark.parametrize("what", ["models", "error"])
@pytest.mark.parametrize("lemma", [non_convex_progress, strongly_convex_progress])
def test_progress_is_paid_for_by_each_source_of_error(lemma, what):
    """From x̂ = x*, with only the models apart or only x̄ ≠ x̂, the bound fails without the term for it."""
    k = Constants(qg.topology.ring(8), Quadratics.random(8, seed=5), beta=0.5, mu=0.5)
    apart, e = torch.zeros(8, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    if what == "models":
        apart = 10 * normal(8, 3, seed=6)
        apart -= apart.mean(dim=0)
    else:
        e = normal(3, seed=6)
    left, terms = lemma(k, k.run(k.problem.minimiser - e + apart, k.buffer_for(e)))
    assert left <= total(terms)
    del terms[what]
    assert left > total(terms) + 1e-3


@pytest.mark.parametrize("what", ["error", "gradient"])
def test_the_error_bound_needs_both_of_its_terms(what):
    """At a stationary point, e⁺ comes from e alone; with e = 0, it comes from the gradient alone."""
    k = Constants(qg.topology.ring(8), Quadratics.random(8, seed=7, apart=0), beta=0.9, mu=0.9)
    e = normal(3, seed=8) * (what == "error")
    x0 = k.problem.minimiser + normal(3, seed=9) * (what == "gradient")
    left, terms = error_contraction(k, k.run(x0, k.buffer_for(e)))
    assert left <= total(terms)
    del terms[what]
    assert left > total(terms) + 1e-3


def test_the_error_bound_is_tight_up_to_its_factor_of_two():
    """At e = −η̃β ḡ/((1 − μ)(1 − β)), where the convexity inequality is an equality, the bound with half of the
    gradient's term is an equality too: the lemma's factor 2 can be dropped, and nothing more.
    """
    k = Constants(qg.topology.ring(8), Quadratics.random(8, seed=10, apart=0), beta=0.5, mu=0.5)
    x0 = k.problem.minimiser + normal(3, seed=11)
    e = -k.rate * k.beta / ((1 - k.mu) * (1 - k.beta)) * gradient_at(k.problem, x0)
    left, terms = error_contraction(k, k.run(x0, k.buffer_for(e)))
    assert float(left) == pytest.approx(float(terms["error"] + terms["gradient"] / 2), rel=1e-10)


def test_the_gain_needs_a_small_learning_rate():
    """A limit such as η ≤ (1 − β)/(4L) is necessary: at η̃ = 3/L the step overshoots and the bounds fail."""
    problem = Quadratics.random(8, seed=12, low=1.0, apart=0)
    k = Constants(qg.topology.ring(8), problem, 0.5, 0.5, lr=1.5 / problem.smoothness)
    r = k.run(problem.minimiser + normal(3, seed=13))
    for lemma in (non_convex_progress, strongly_convex_progress):
        left, terms = lemma(k, r)
        assert left > total(terms)


def theorem(topology, problem, mu):
    """Constants with the theorem's largest β and its η for σ = 0."""
    beta, L = topology.largest_beta, problem.smoothness
    lr = min(topology.rho / 7, (1 - beta) / 4, (1 - mu) * (1 - beta) ** 2 / (4 * beta)) / L
    return Constants(topology, problem, beta, mu, lr)


def potential(k: Constants, r: Run) -> torch.Tensor:
    """Φ of the theorem's proof, with f(x̂) instead of the printed f(x̄)."""
    L, rho, beta = k.problem.smoothness, k.topology.rho, k.beta
    return (
        24 * L**2 * k.rate / rho * spread(r.x)
        + 144 * L**2 * k.rate**3 * beta**2 * (1 - beta) / (rho**2 * (1 - k.mu)) * spread(r.m_hat)
        + 1.5 * L**2 * k.rate / ((1 - k.mu) * (1 - beta)) * squared(k.error(r))
        + k.problem.value(r.x.mean(dim=1) + k.error(r))
        - k.problem.lowest
    )


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("topology", graphs("ring:8", "social", "lazy/complete:4"))
@pytest.mark.parametrize("family", [Quadratics, Cosines])
def test_the_potential_falls_and_bounds_the_gradient_of_the_mean(family, topology, mu):
    """Theorem 'Convergence of QG-DSGDm for non-convex functions', at σ = 0, from a common start and M = 0:

    Φ⁺ ≤ Φ − (η̃/4)‖∇f(x̄)‖² + 312 L²η̃³(1 − β)²ζ²/ρ², and so, for every T,
    (1/T) Σ ‖∇f(x̄)‖² ≤ 4(f(x̄⁰) − f*)/(η̃T) + 1248 L²η̃²(1 − β)²ζ²/ρ².
    """
    problem = family.random(topology.n, seed=14)
    k = theorem(topology, problem, mu)
    r = k.run(3 * normal(3, seed=15), steps=60)
    x_bar = r.x[:-1].mean(dim=1)
    gradient = squared(gradient_at(problem, x_bar))
    drift = problem.smoothness**2 * k.rate**2 * (1 - k.beta) ** 2 / topology.rho**2
    drift = drift * zeta_squared(problem, x_bar)

    phi = potential(k, r)
    assert phi[0] == pytest.approx(float(problem.value(x_bar[0])) - problem.lowest)
    assert (phi >= 0).all()
    assert (phi[1:] <= phi[:-1] - k.rate / 4 * gradient + 312 * k.rate * drift + ROUNDING).all()

    T = torch.arange(1, len(gradient) + 1)
    bound = 4 * phi[0] / (k.rate * T) + 1248 * drift.cummax(dim=0).values
    assert (gradient.cumsum(dim=0) / T <= bound).all()


def test_the_theorem_needs_its_heterogeneity_term():
    """From the minimiser the other term is 0, but the nodes' different functions move the mean away."""
    topology = qg.topology.ring(8)
    problem = Quadratics.random(8, seed=16)
    k = theorem(topology, problem, mu=0.5)
    r = k.run(problem.minimiser, steps=60)
    assert potential(k, r)[0].abs() < ROUNDING
    assert squared(gradient_at(problem, r.x.mean(dim=1))).mean() > 1e-6
