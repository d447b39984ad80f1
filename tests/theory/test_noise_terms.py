"""The σ² terms of the appendix's lemmas, with the expectation over the noise computed exactly.

Node i's gradient is exact plus s_i σ u_i, u_i a unit vector, s a row of ± a Hadamard matrix, all 2n rows
equally likely. Then E s_i = 0 and E s_i s_j = δ_ij as for independent noise. For quadratic f, every quantity
that the lemmas bound is quadratic in s, so the mean over the 2n rows is the exact expectation.
"""

import pytest
import torch
from theory_problems import Quadratics, gradient_at, normal, run, spread, squared, zeta_squared

import quasiglobal as qg

N, SIGMA, MU = 8, 0.7, 0.5
RING = qg.topology.ring(N)
ROUNDING = 1e-14
"""Absolute tolerance; the noise terms are 1e-6 or more."""


def sign_rows() -> torch.Tensor:
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < N:
        H = torch.cat([torch.cat([H, H], dim=1), torch.cat([H, -H], dim=1)])
    return torch.cat([H, -H])


UNIT = torch.nn.functional.normalize(normal(N, 3, seed=1), dim=1)


class Step:
    """One stochastic step from (x, m_hat), with expectations over the noise."""

    def __init__(self, problem, x, m_hat, beta, lr):
        self.problem, self.beta, self.lr = problem, beta, lr
        self.L, self.rho, self.rate = problem.smoothness, RING.rho, lr / (1 - beta)
        self.x, self.m_hat, self.g = x, m_hat, problem.gradient(x)
        name = f"qg-dsgdm:beta={beta!r},mu={MU}"
        self.outcomes = []
        for signs in sign_rows():
            noise = SIGMA * signs[:, None] * UNIT
            r = run(lambda x, t, noise=noise: problem.gradient(x) + noise, x, name, RING, lr, 1, m_hat)
            self.outcomes.append((r.x[1], r.m_hat[1]))

    def expected(self, quantity) -> float:
        """E quantity(X⁺, M⁺)."""
        return float(torch.stack([quantity(x, m) for x, m in self.outcomes]).mean())

    def error(self, m_hat):
        return -self.lr * self.beta / ((1 - MU) * (1 - self.beta)) * m_hat.mean(dim=0)

    def virtual(self, x, m_hat):
        return x.mean(dim=0) + self.error(m_hat)

    @property
    def weight(self) -> float:
        return 6 * self.lr**2 * self.beta**2 / (self.rho * (1 - MU) * (1 - self.beta))

    @property
    def zeta2(self):
        return zeta_squared(self.problem, self.x.mean(dim=0))


def consensus_change(s: Step):
    """'One step consensus change': … + 4(1 − ρ)η²σ²."""
    bound = (1 - s.rho / 4) * spread(s.x) + 12 * s.lr**2 * s.zeta2 / s.rho
    bound = bound + 6 * s.lr**2 * s.beta**2 / s.rho * spread(s.m_hat)
    return s.expected(lambda x, m: spread(x)), bound, 4 * (1 - s.rho) * s.lr**2 * SIGMA**2


def momentum_change(s: Step):
    """'One step momentum change': … + η²ρσ²(1 − β)/(8(1 − μ))."""
    bound = s.weight * (1 - (1 - MU) * (1 - s.beta)) * spread(s.m_hat)
    bound = bound + s.rho / 8 * spread(s.x) + s.lr**2 * s.rho * s.zeta2 / 8
    noise = s.lr**2 * s.rho * SIGMA**2 * (1 - s.beta) / (8 * (1 - MU))
    return s.weight * s.expected(lambda x, m: spread(m)), bound, noise


def consensus_improvement(s: Step):
    """'One step consensus improvement': … + 13η²σ²(2 − β − μ)/((1 − μ)ρ)."""
    bound = (1 - s.rho / 8) * spread(s.x) + s.weight * spread(s.m_hat) + 13 * s.lr**2 * s.zeta2 / s.rho
    noise = 13 * s.lr**2 * SIGMA**2 * (2 - s.beta - MU) / ((1 - MU) * s.rho)
    return s.expected(lambda x, m: spread(x) + s.weight * spread(m)), bound, noise


def error_contraction(s: Step):
    """'One step error contraction': … + η̃²β²σ²."""
    slow = (1 - MU) * (1 - s.beta)
    bound = (1 - slow) * squared(s.error(s.m_hat))
    bound = bound + 2 * s.rate**2 * s.beta**2 / slow * squared(s.g.mean(dim=0))
    return s.expected(lambda x, m: squared(s.error(m))), bound, s.rate**2 * s.beta**2 * SIGMA**2


def strongly_convex_progress(s: Step):
    """'Strongly-convex one step progress': … + η̃²σ²/n."""
    best, x_bar = s.problem.minimiser, s.x.mean(dim=0)
    bound = (1 - s.problem.strong_convexity * s.rate / 2) * squared(s.virtual(s.x, s.m_hat) - best)
    bound = bound - 0.75 * s.rate * (s.problem.value(x_bar) - s.problem.lowest)
    bound = bound + 8 * s.L * s.rate * squared(s.error(s.m_hat)) + 5 * s.L * s.rate * spread(s.x)
    return s.expected(lambda x, m: squared(s.virtual(x, m) - best)), bound, s.rate**2 * SIGMA**2 / N


def non_convex_progress(s: Step):
    """'Non-convex one step progress': … + Lη̃²σ²/n."""
    f, x_bar = s.problem.value, s.x.mean(dim=0)
    bound = f(s.virtual(s.x, s.m_hat)) + 1.5 * s.L**2 * s.rate * squared(s.error(s.m_hat))
    bound = bound - s.rate / 4 * (squared(gradient_at(s.problem, x_bar)) + squared(s.g.mean(dim=0)))
    bound = bound + 3 * s.L**2 * s.rate * spread(s.x)
    return s.expected(lambda x, m: f(s.virtual(x, m))), bound, s.L * s.rate**2 * SIGMA**2 / N


CONSENSUS = [consensus_change, momentum_change, consensus_improvement]
LEMMAS = [*CONSENSUS, error_contraction, strongly_convex_progress, non_convex_progress]


def step_for(lemma, problem, x, m_hat) -> Step:
    """A step at the largest β and η that the lemma allows (β = 0.9 if it allows any β)."""
    if lemma in CONSENSUS:
        return Step(problem, x, m_hat, RING.largest_beta, RING.rho / (7 * problem.smoothness))
    return Step(problem, x, m_hat, 0.9, 0.1 / (4 * problem.smoothness))


@pytest.mark.parametrize("lemma", LEMMAS)
def test_the_lemma_holds_in_expectation(lemma):
    for scale in (0.01, 1.0):
        problem = Quadratics.random(N, seed=2)
        x, m_hat = scale * normal(N, 3, seed=3), scale * normal(N, 3, seed=4)
        left, bound, noise = lemma(step_for(lemma, problem, x, m_hat))
        assert left <= bound + noise + ROUNDING


@pytest.mark.parametrize("lemma", LEMMAS)
def test_the_lemma_needs_its_noise_term(lemma):
    """From a common minimiser and M = 0, only noise moves the nodes: the rest of the bound is 0."""
    problem = Quadratics.random(N, seed=5, apart=0)
    x = problem.minimiser.expand(N, -1)
    left, bound, noise = lemma(step_for(lemma, problem, x, torch.zeros_like(x)))
    assert float(bound) == pytest.approx(0, abs=ROUNDING)
    assert ROUNDING < left <= noise + ROUNDING
