"""MimeLite: clients step with a momentum that the server freezes for the round.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: Mime: mimicking
centralized stochastic algorithms in federated learning. 2020.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class MimeLite(Algorithm):
    """Rounds of τ local steps from a common model, with a momentum s that is fixed during a round.

        y_i ← y_i − η ((1 − β) g_i + β s)               τ times, at the sampled clients
        s ← (1 − β) mean_S ∇f_i(x) + β s                full local gradients at the round's start
        x ← mean_S y_i

    Differs from `qg-dsgdm` in the direction: it uses full-batch gradients and exact means over the sampled
    clients S. It is a federated method; `qg-dsgdm` needs only the neighbours. Clients outside S wait.
    `participation` is the fraction of clients in S, which are drawn in each round from (seed, round).
    """

    citation: ClassVar[str] = "Karimireddy et al. 2020"
    limits: ClassVar[dict[str, str]] = Algorithm.limits | {"participation": "(0, 1]"}

    beta: float = 0.9
    tau: int = 1
    participation: float = 1.0

    def init(self, x: Tensor) -> State:
        return {"x": x} | zeros(x, "s")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        begins, ends = self.phase(node.t)
        server, s = x if begins else state["x"], state["s"]
        sampled = None
        y = x - node.lr * ((1 - self.beta) * g + self.beta * s)
        if self.participation < 1:
            sampled = node.sample(self.participation, ((node.time - 1) / self.tau).floor())
            y = torch.where(sampled > 0, y, x)
        if not ends:
            return y, {"x": server, "s": s}
        gradient = node.mean(node.full_gradient(server), among=sampled)
        return node.mean(y, among=sampled), {"x": server, "s": (1 - self.beta) * gradient + self.beta * s}

    def phase(self, t: int) -> tuple[Hashable, Hashable]:
        """Whether step t begins a round, and whether it ends one."""
        return (t - 1) % self.tau == 0, t % self.tau == 0

    @property
    def needs(self) -> Needs:
        return Needs(
            doubly_stochastic=False, keeps_mean=self.participation == 1,
            refuses_base="needs the gradient over all of a node's data",
        )
