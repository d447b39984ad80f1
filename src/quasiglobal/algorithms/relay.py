"""RelaySGD: models relayed along a spanning tree, which averages all nodes uniformly, with a delay.

T. Vogels, L. He, A. Koloskova, T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi: RelaySum for decentralized deep
learning on heterogeneous data. NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Edges, Node, State, Wrapper, named, unnamed
from quasiglobal.algorithms.local_base import Local, check_local, refuses_optimizer
from quasiglobal.algorithms.needs import Needs
from quasiglobal.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RelaySGD(Wrapper):
    """A local step of `base`, then the mean of all models, each as old as its distance on the tree.

        x_i ← the base's local step, such as x_i − η g_i
        send to each neighbour j:  m_{i→j} = x_i + Σ_{k≠j} m_{k→i},  c_{i→j} = 1 + Σ_{k≠j} c_{k→i}
        x_i ← (Σ_k m_{k→i} + (n − c_i) x_i) / n,  c_i = Σ_k c_{k→i}

    The messages in the second line are those received at the last step, 0 at the start; in the third line they are new.
    c counts the models in a message: until the tree is warm, and after a lost message, the node's own model stands for
    the missing ones (`fill=own`, the paper's form). `fill=start` uses the node's first model in their place, as the
    authors' code does. On a topology with a period of P trees, coordinates p, p + P, … travel on tree p at every step,
    as on the paper's double binary trees, the topology `double-trees:N`.

    Differs from `dsgd` in that every model has the same weight 1/n after as many steps as the tree is wide: with
    exact gradients it reaches the minimiser on heterogeneous data too. The delay lowers the largest stable η. There is
    no mixing matrix, and only a tree will do: on a cycle a model would be counted again and again.
    """

    citation: ClassVar[str] = "Vogels et al. 2021"

    fill: Literal["own", "start"] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local(self.base, "relaysgd")

    def init(self, x: Tensor) -> State:
        return named(self.base.init(x)) | ({"x0": x} if self.fill == "start" else {})

    def init_edges(self, x: Tensor, edges: Edges) -> State:
        slots = (len(x), edges.degree)
        return {"m": x.new_zeros(*slots, x.shape[1]), "c": x.new_zeros(*slots, edges.period)}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        trees = node.edges.period
        if trees > 1 and node.edges.senders.shape[2] > 1:
            raise InputError("relaysgd on several trees sends whole models; use one tree if some parameters stay local")
        x, inner = self.base.step(x, g, unnamed(state), Local(node))
        kept = {"x0": state["x0"]} if self.fill == "start" else {}
        start = kept.get("x0", x)
        parts = []
        for p in range(trees):
            m, c = (state[name][..., p::trees] for name in ("m", "c"))
            parts.append(self._relayed(x[:, p::trees], m, c, start[:, p::trees], node, p))
        x, m, c = (_interleaved(values) for values in zip(*parts, strict=True))
        return x, named(inner) | kept | {"m": m, "c": c}

    def _relayed(
        self, x: Tensor, m: Tensor, c: Tensor, x0: Tensor, node: Node, tree: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Relay the columns of one tree; return their new x, messages and counts."""
        n = node.edges.n
        to_others = x[:, None] + m.sum(dim=1, keepdim=True) - m
        counts = 1 + c.sum(dim=1, keepdim=True) - c
        (m, c), came = node.exchange(to_others, counts, at=tree + 1)
        change = torch.where(came, m - c * x[:, None], 0.0).sum(dim=1)
        if self.fill == "start":
            missing = torch.where(node.edges.senders.any(dim=1), n - 1 - c.sum(dim=1), 0.0)
            change = change + missing * (x0 - x)
        return x + change / n, m, c

    @property
    def needs(self) -> Needs:
        return super().needs._replace(
            doubly_stochastic=False, tree=True, needs_full_precision=True, follows_messages=True, keeps_mean=False,
            refuses_base=refuses_optimizer(self.base),
        )


def _interleaved(parts: tuple[Tensor, ...]) -> Tensor:
    """Put the columns of several trees back in order."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    for p, part in enumerate(parts):
        whole[..., p :: len(parts)] = part
    return whole
