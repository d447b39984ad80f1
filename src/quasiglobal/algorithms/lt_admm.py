"""LT-ADMM: local training with corrections along each edge, which lost messages do not harm.

X. Ren, N. Bastianello, K. H. Johansson, T. Parisini: Communication-efficient stochastic distributed learning. 2025.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Edges, Node, State, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class LTADMM(Algorithm):
    """Rounds of τ local steps towards the node's own minimum and, by the correction r, towards the neighbours.

        r_i = ρ |N(i)| x_i − Σ_j z_ij                                once per round; z_ij = x_i before the first
        x_i ← x_i − γ g_i − β_a r_i                                  τ times
        send to each neighbour j:  q_{i→j} = z_ij − 2ρ x_i
        z_ij ← (1 − α) z_ij − α q_{j→i}                              z_ij stays, if the message did not come

    γ is the learning rate, or the constant option `gamma`. With β > 0, the momentum m ← β m + (1 − β) g replaces
    g (not in the paper).
    `couple=true` multiplies β_a by γ too: a decay of the rate then causes no jump, at the cost of a weaker consensus.

    Differs from `d2` and `dsgd-gt` in where it remembers the differences between nodes: in z, one for each edge, not
    in a sum over all nodes. A lost message delays its own edge only: the fixed point is the minimiser, with any
    loss. Any connected undirected graph will do; there is no mixing matrix.
    """

    citation: ClassVar[str] = "Ren et al. 2025"
    limits: ClassVar[dict[str, str]] = Algorithm.limits | {
        "rho": "(0, inf)", "alpha": "(0, 1)", "beta_a": "[0, inf)", "gamma": "(0, inf)", "beta": "[0, 1)",
    }

    tau: int = 5
    rho: float = 1.0
    alpha: float = 0.5
    beta_a: float = 0.01
    gamma: float | None = None
    beta: float = 0.0
    couple: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "m") if self.beta else {}

    def init_edges(self, x: Tensor, edges: Edges) -> State:
        z = x[:, None] * edges.senders
        return {"z": z, "r": self._correction(x, z, edges)}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        gamma = node.lr if self.gamma is None else self.gamma
        z, r, kept = state["z"], state["r"], {}
        if self.beta:
            g = self.beta * state["m"] + (1 - self.beta) * g
            kept = {"m": g}
        x = x - gamma * g - (gamma * self.beta_a if self.couple else self.beta_a) * r
        if self.phase(node.t):
            q, came = node.exchange(z - 2 * self.rho * x[:, None])
            z = torch.where(came, (1 - self.alpha) * z - self.alpha * q, z)
            r = self._correction(x, z, node.edges)
        return x, kept | {"z": z, "r": r}

    def phase(self, t: int) -> Hashable:
        """Whether step t ends a round."""
        return t % self.tau == 0

    def _correction(self, x: Tensor, z: Tensor, edges: Edges) -> Tensor:
        return self.rho * (edges.senders.sum(dim=1) * x) - z.sum(dim=1)

    @property
    def needs(self) -> Needs:
        plain = self.gamma is None and not self.beta and not self.couple
        other = "uses the gradient or the learning rate in another way than a plain step"
        return Needs(
            doubly_stochastic=False, undirected=True, loss="proof", needs_full_precision=True, follows_messages=True,
            keeps_mean=False, rests=self.rho == 1,          # z starts at x, and rests at ρ x
            refuses_base=None if plain else other,
        )
