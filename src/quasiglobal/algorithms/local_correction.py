"""Local steps with a correction: a round of τ gradient steps at each node, then one exchange.

K-GT: Y. Liu, T. Lin, A. Koloskova, S. U. Stich: Decentralized gradient tracking with local steps. 2023.
LED: S. A. Alghunaim: Local exact-diffusion for decentralized optimization and learning. 2023.
ProxSkip: K. Mishchenko, G. Malinovsky, S. Stich, P. Richtárik: ProxSkip: yes! Local gradient steps provably lead to
communication acceleration! Finally! ICML 2022. On a graph: L. Guo, S. A. Alghunaim, K. Yuan, L. Condat, J. Cao:
Achieving linear speedup with ProxSkip in distributed stochastic optimization. 2023.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class KGT(Algorithm):
    """Gradient tracking over rounds: each node corrects its τ local steps by the last rounds' mean movement.

        x_i ← x_i − η (g_i + c_i)                           τ times, from the round's start x⁰
        z_i ← (x⁰_i − x_i) / (τη)
        c_i ← c_i − z_i + Σ_j w_ij z_j
        x_i ← Σ_j w_ij (x⁰_j − τη η_s z_j)                  η_s: `server_lr`

    Differs from `dsgd-gt` in communicating after every τ-th step only, with two models in one message; from `led` in
    accepting any doubly stochastic W. With exact gradients it reaches the exact minimiser. c starts at 0.
    """

    citation: ClassVar[str] = "Liu et al. 2023"
    limits: ClassVar[dict[str, str]] = Algorithm.limits | {"server_lr": "(0, inf)"}

    tau: int = 5
    server_lr: float = 1.0

    def init(self, x: Tensor) -> State:
        return {"x0": x} | zeros(x, "c")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        x0, c = state["x0"], state["c"]
        x = descend(x, node.lr, g + c)
        if not self.phase(node.t):
            return x, {"x0": x0, "c": c}
        z = (x0 - x) / (self.tau * node.lr)
        x, mixed = node.mix(torch.lerp(x0, x, self.server_lr), z)
        return x, {"x0": x, "c": c - z + mixed}

    def phase(self, t: int) -> Hashable:
        """Whether step t ends a round."""
        return t % self.tau == 0

    @property
    def needs(self) -> Needs:
        return Needs(refuses_drift=True, loss="harmed", divides_by_lr=True, refuses_base=None)


@dataclass(frozen=True, kw_only=True)
class LED(Algorithm):
    """Local exact diffusion: τ local steps against a dual variable y, then an average.

        x_i ← x_i − η g_i − y_i/τ                           τ times
        x_i⁺ ← Σ_j w̃_ij x_j
        y_i ← y_i + x_i − x_i⁺

    W̃ is W, or (I + W)/2 if λ_min(W) ≤ −1/3.

    Differs from `k-gt` in sending one model per round, and in needing a fixed symmetric W; with τ = 1 and a constant η
    it is `ed`. With exact gradients it reaches the exact minimiser. y, which starts at 0, is a movement: after a decay
    of η it takes some rounds to shrink.
    """

    citation: ClassVar[str] = "Alghunaim 2023"

    tau: int = 5

    def init(self, x: Tensor) -> State:
        return zeros(x, "y")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        y = state["y"]
        x = descend(x, node.lr, g) - y / self.tau
        if not self.phase(node.t):
            return x, state
        x_new = node.mix(x)
        return x_new, {"y": y + x - x_new}

    def phase(self, t: int) -> Hashable:
        """Whether step t ends a round."""
        return t % self.tau == 0

    @property
    def needs(self) -> Needs:
        return Needs(refuses_drift=True, lambda_min_above=-1 / 3, lazy=True, loss="harmed", refuses_base=None)


@dataclass(frozen=True, kw_only=True)
class ProxSkip(Algorithm):
    """Gradient steps against a dual variable y; all nodes average together at random steps, with probability p.

        z_i ← x_i − η g_i − y_i
        x_i ← (z_i + Σ_j w_ij z_j)/2  with probability p,   else z_i
        y_i ← y_i + p (z_i − x_i)

    Differs from `led` in its rounds, whose length is random; it is drawn from (seed, t) and is the same for all nodes.
    With exact gradients it reaches the exact minimiser. y starts at 0.
    """

    citation: ClassVar[str] = "Mishchenko et al. 2022; Guo et al. 2023"
    limits: ClassVar[dict[str, str]] = {"p": "(0, 1]"}

    p: float = 0.2

    def init(self, x: Tensor) -> State:
        return zeros(x, "y")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        y = state["y"]
        z = descend(x, node.lr, g) - y
        x = torch.lerp(z, node.mix_sometimes(self.p, z), 0.5)
        return x, {"y": y + self.p * (z - x)}

    @property
    def needs(self) -> Needs:
        return Needs(refuses_drift=True, fixed=True, symmetric=True, loss="harmed", refuses_base=None)
