"""Objectives whose constants L, ζ, f* and minimiser are known exactly, and runs that keep every iterate.

In the paper's appendix, M^(t) and X^(t) are the buffer and the model *before* step t. So here x[t], m_hat[t]
and g[t], t = 0, 1, …, are X^(t), M^(t) and G^(t).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import quasiglobal as qg
from quasiglobal.algorithms import Wrapper, algorithm


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = ½ (x − c_i)ᵀ H_i (x − c_i), one per node; f is their mean."""

    H: Tensor
    c: Tensor

    @classmethod
    def random(cls, n: int, d: int = 3, seed: int = 0, low: float = 0.2, high: float = 1.0, apart: float = 1):
        """Eigenvalues of each H_i in [low, high]; `apart` = 0 gives every node the same function."""
        draw = torch.Generator().manual_seed(seed)
        count = n if apart else 1
        Q = torch.linalg.qr(torch.randn(count, d, d, generator=draw, dtype=torch.float64)).Q
        eigenvalues = low + (high - low) * torch.rand(count, d, generator=draw, dtype=torch.float64)
        H = (Q * eigenvalues[:, None, :]) @ Q.mT
        c = apart * torch.randn(n, d, generator=draw, dtype=torch.float64)
        return cls(H.expand(n, d, d), c)

    def gradient(self, x: Tensor, t: int = 0) -> Tensor:
        """∇f_i at row i of x, [..., n, d]."""
        return torch.einsum("nij,...nj->...ni", self.H, x - self.c)

    def value(self, x: Tensor) -> Tensor:
        """f at points [..., d]."""
        apart = x[..., None, :] - self.c
        return torch.einsum("...ni,nij,...nj->...", apart, self.H, apart) / (2 * len(self.c))

    @property
    def smoothness(self) -> float:
        """The paper's L."""
        return float(torch.linalg.eigvalsh(self.H).max())

    @property
    def strong_convexity(self) -> float:
        return float(torch.linalg.eigvalsh(self.H).min())

    @property
    def minimiser(self) -> Tensor:
        pull = torch.einsum("nij,nj->i", self.H, self.c)
        return torch.linalg.solve(self.H.sum(dim=0), pull)

    @property
    def lowest(self) -> float:
        return float(self.value(self.minimiser))


@dataclass(frozen=True)
class Cosines:
    """f_i(x) = Σ_k a_ik cos(x_k + b_ik): smooth with L = max |a_ik|, and not convex."""

    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, n: int, d: int = 3, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        a = 0.2 + 0.8 * torch.rand(n, d, generator=draw, dtype=torch.float64)
        b = math.pi * torch.rand(n, d, generator=draw, dtype=torch.float64)
        return cls(a, b)

    def gradient(self, x: Tensor, t: int = 0) -> Tensor:
        return -self.a * torch.sin(x + self.b)

    def value(self, x: Tensor) -> Tensor:
        return (self.a * torch.cos(x[..., None, :] + self.b)).mean(dim=-2).sum(dim=-1)

    @property
    def smoothness(self) -> float:
        return float(self.a.abs().max())

    @property
    def lowest(self) -> float:
        """The mean of cosines of one frequency is a cosine, with the amplitude of the mean phasor."""
        return -float(torch.polar(self.a, self.b).mean(dim=0).abs().sum())


Problem = Quadratics | Cosines


def gradient_at(problem: Problem, x: Tensor) -> Tensor:
    """∇f at points [..., d]."""
    return node_gradients_at(problem, x).mean(dim=-2)


def node_gradients_at(problem: Problem, x: Tensor) -> Tensor:
    """∇f_i at the same points [..., d] for every i: [..., n, d]."""
    n = len(problem.gradient(x.new_zeros(x.shape[-1])))
    return problem.gradient(x[..., None, :].expand(*x.shape[:-1], n, x.shape[-1]))


def zeta_squared(problem: Problem, x: Tensor) -> Tensor:
    """(1/n) Σ_i ‖∇f_i(x) − ∇f(x)‖² at points [..., d]."""
    return spread(node_gradients_at(problem, x))


def spread(Z: Tensor) -> Tensor:
    """(1/n) ‖Z − Z̄‖²_F over the last two dimensions, [..., n, d]."""
    return (Z - Z.mean(dim=-2, keepdim=True)).square().sum(dim=(-2, -1)) / Z.shape[-2]


def squared(v: Tensor) -> Tensor:
    """‖v‖² of vectors [..., d]."""
    return v.square().sum(dim=-1)


def noisy(problem: Problem, sigma: float, seed: int = 0):
    """Stochastic gradients: exact gradients plus independent Gaussian noise, a function of (seed, t)."""

    def gradient(x: Tensor, t: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * seed + t)
        return problem.gradient(x) + sigma * torch.randn(x.shape, generator=draw, dtype=x.dtype)

    return gradient


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class _Tape(Wrapper):
    """`base` from a given buffer, with its gradients and states recorded."""

    m_hat: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def init(self, x):
        state = self.base.init(x) if self.m_hat is None else {"m_hat": self.m_hat}
        self.states.append(state)
        return state

    def step(self, x, g, state, node):
        x_new, new_state = self.base.step(x, g, state, node)
        self.gradients.append(g.clone())
        self.states.append({name: value.clone() for name, value in new_state.items()})
        return x_new, new_state


@dataclass(frozen=True)
class Run:
    """Every iterate of a run: x, m_hat [T + 1, n, d], g [T, n, d]."""

    x: Tensor
    g: Tensor
    m_hat: Tensor


def run(gradient, x0, name, topology, lr, steps, m_hat=None) -> Run:
    """`steps` steps of a method of the quasi-global family from x0 and the buffer m_hat (0 if not given)."""
    tape = _Tape(base=algorithm(name), m_hat=m_hat)
    result = qg.minimize(gradient, x0, tape, topology, lr=lr, steps=steps)
    buffers = torch.stack([state["m_hat"] for state in tape.states])
    return Run(result.history, torch.stack(tape.gradients), buffers)


def directed_ring(n: int) -> qg.Topology:
    """Each node mixes with the next node only: doubly stochastic, not symmetric."""
    return qg.topology.from_matrices([0.6 * np.eye(n) + 0.4 * np.roll(np.eye(n), 1, axis=1)])


class QuasiGlobal:
    """Quasi-global momentum in a lemma's setting; subclasses set the graph, the objective, β, μ and the rate."""

    topology: qg.Topology
    beta: float
    mu: float
    lr: float

    def run(self, x0, m_hat=None, steps=1) -> Run:
        name = f"qg-dsgdm:beta={self.beta!r},mu={self.mu}"
        return run(self.problem.gradient, x0, name, self.topology, self.lr, steps, m_hat)
