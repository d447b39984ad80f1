"""Small problems with known solutions and their gradients, for `qg.minimize`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quasiglobal.common.randomness import generator


def gradient_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """The gradient of a function that maps each row of [n, d] to a number."""

    def gradient(x: Tensor, t: int) -> Tensor:
        slopes: Tensor = torch.func.grad(lambda rows: function(rows).sum())(x)
        return slopes

    return gradient


def rosenbrock(points: Tensor) -> Tensor:
    """(y − x²)² + 100 (x − 1)², as the paper prints it; the minimum is at (1, 1).

    >>> rosenbrock(torch.tensor([[1.0, 1.0], [0.0, 0.0]])).tolist()
    [0.0, 100.0]
    """
    x, y = points.unbind(dim=-1)
    return (y - x**2) ** 2 + 100 * (x - 1) ** 2


def winding_valley(points: Tensor) -> Tensor:
    """log(eˣ + e⁻ˣ) + 10 log(eᵘ + e⁻ᵘ), u = eˣ (y − sin 8x); the minimum is at (0, 0).

    J. Lucas, S. Sun, R. Zemel, R. Grosse: Aggregated momentum. ICLR 2019.
    """
    x, y = points.unbind(dim=-1)
    u = x.exp() * (y - torch.sin(8 * x))
    return torch.logaddexp(x, -x) + 10 * torch.logaddexp(u, -u)


def pull_towards(minima: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A gradient of length one at each node, away from the node's own minimum: constant update magnitude."""

    def gradient(x: Tensor, t: int) -> Tensor:
        return torch.nn.functional.normalize(x - minima, dim=-1)

    return gradient


@dataclass(frozen=True)
class NoisyWell:
    """Heterogeneous, non-convex, noisy problem: f_i(x) = ½ Σ_k x_k²/(1 + x_k²) + a_iᵀx, Σ a_i = 0.

    The nodes' tilts a_i have root-mean-square length ζ and mean 0; the gradient noise has variance σ².
    Rows are runs × nodes, as in the simulator.
    """

    n: int
    runs: int = 1
    d: int = 10
    sigma: float = 3.0
    zeta: float = 3.0
    seed: int = 0

    def start(self) -> Tensor:
        """Initial point beyond the inflection of every coordinate, where the curvature is negative."""
        return torch.ones(self.runs * self.n, self.d)

    def tilts(self) -> Tensor:
        """The a_i of every row."""
        tilt = generator(self.seed, self.n).standard_normal((self.n, self.d))
        tilt -= tilt.mean(axis=0)
        size = math.sqrt((tilt**2).sum(axis=1).mean()) or 1.0
        return torch.tensor(self.zeta / size * tilt, dtype=torch.float32).repeat(self.runs, 1)

    def mean_gradient(self, x: Tensor) -> Tensor:
        """∇f of the mean objective at any point."""
        return x / (1 + x**2) ** 2

    def gradients(self) -> Callable[[Tensor, int], Tensor]:
        """Each node's noisy gradient; the noise is a function of (seed, t)."""
        tilts, noise = self.tilts(), torch.Generator()

        def gradient(x: Tensor, t: int) -> Tensor:
            xi = torch.randn(x.shape, generator=noise.manual_seed(self.seed * 2**32 + t))
            return self.mean_gradient(x) + tilts + self.sigma / math.sqrt(self.d) * xi

        return gradient
