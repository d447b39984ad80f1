"""CHOCO-SGD: gossip with compressed messages, whose error each node keeps.

A. Koloskova, S. U. Stich, M. Jaggi: Decentralized stochastic optimization and gossip algorithms with compressed
communication. ICML 2019.
AdaGossip: S. A. Aketi, A. Hashemi, K. Roy: AdaGossip: adaptive consensus step-size for decentralized deep learning with
communication compression. 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Node, State, Wrapper, named, unnamed, zeros
from quasiglobal.algorithms.local_base import Local, check_local, refuses_optimizer
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class Choco(Wrapper):
    """A local step of `base`, then gossip of models x̂ that all neighbours know, at strength γ.

        x_i ← the base's local step, such as x_i − η g_i
        send q_i = Q(x_i − x̂_i);   x̂_i ← x̂_i + q_i                       x̂ = 0 at the start
        x_i ← x_i + γ (Σ_j w_ij x̂_j − x̂_i)

    Q is the run's wire, such as topk:0.01; what it leaves out of a message stays in x − x̂ and is sent later. γ has to
    be smaller for stronger compression. Differs from `dsgd` in what is mixed: x̂ in place of x. Without compression,
    x̂ = x, and γ = 1 is `dsgd`. It is biased on heterogeneous data, more than `dsgd`.
    """

    citation: ClassVar[str] = "Koloskova et al. 2019"
    limits: ClassVar[dict[str, str]] = {"gamma": "(0, 1]"}

    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local(self.base, "choco")

    def init(self, x: Tensor) -> State:
        return named(self.base.init(x)) | zeros(x, "x_hat", "mixed")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        x, inner = self.base.step(x, g, unnamed(state), Local(node))
        q, mixed_q = node.tell(x - state["x_hat"])
        x_hat, mixed = state["x_hat"] + q, state["mixed"] + mixed_q             # mixed = W x_hat
        pull, memory = self._pull(mixed - x_hat, state, node)
        return x + pull, named(inner) | {"x_hat": x_hat, "mixed": mixed} | memory

    def _pull(self, r: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        """The movement towards the neighbours, whose x̂ differ by r on average, and its part of the new state."""
        return self.gamma * r, {}

    @property
    def needs(self) -> Needs:
        return super().needs._replace(                      # W x̂ is a sum over the steps
            fixed=True, symmetric=True, loss="harmed", compresses=True, follows_messages=True,
            refuses_base=refuses_optimizer(self.base),
        )


@dataclass(frozen=True, kw_only=True)
class AdaGossip(Choco):
    """CHOCO-SGD whose strength of gossip adapts to each parameter, smaller where neighbours differ more.

        x_i ← the base's local step;   x̂_i ← x̂_i + Q(x_i − x̂_i)           as in `choco`
        r_i = Σ_j w_ij x̂_j − x̂_i
        v_i ← ρ v_i + (1 − ρ) r_i²                                           v = 0 at the start
        x_i ← x_i + min(1, γ / (√(v_i / (1 − ρᵗ)) + 10⁻⁸)) r_i               all per parameter

    Differs from `choco` in γ, which is a length here: a parameter moves towards its neighbours' by about γ at a step,
    or all the way if it is closer. The nodes' mean moves, since each node has its own strengths.
    """

    citation: ClassVar[str] = "Aketi et al. 2024"
    limits: ClassVar[dict[str, str]] = Choco.limits | {"gamma": "(0, inf)", "rho": "(0, 1)"}

    gamma: float = 0.01
    rho: float = 0.999

    def init(self, x: Tensor) -> State:
        return super().init(x) | zeros(x, "v")

    def _pull(self, r: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        v = torch.lerp(r * r, state["v"], self.rho)
        weight = -torch.expm1(node.time * math.log(self.rho))                   # 1 − ρᵗ, also where ρᵗ rounds to 1
        strength = self.gamma / ((v / weight).sqrt() + 1e-8)
        return strength.clamp_max(1) * r, {"v": v}

    @property
    def needs(self) -> Needs:
        return super().needs._replace(keeps_mean=False)
