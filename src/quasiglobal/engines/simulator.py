"""All nodes here, as rows of one tensor; several runs may share a program as further rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.node import StepNode, choose
from quasiglobal.errors import InputError, whole
from quasiglobal.topology import TOLERANCE, Topology


class Simulator:
    """Row r·n + i of every tensor is node i of run r. `mix` and `mean` act within a run.

    Only the first `shared` columns are communicated, all of them by default.

    >>> from quasiglobal import topology
    >>> engine = Simulator(topology.complete(2), seeds=(0, 1), shared=1)
    >>> x = torch.tensor([[0.0, 5.0], [2.0, 6.0], [10.0, 7.0], [30.0, 8.0]])
    >>> engine.mix(1, (x,))[0].tolist()
    [[1.0, 5.0], [1.0, 6.0], [20.0, 7.0], [20.0, 8.0]]
    """

    def __init__(self, topology: Topology, *, seeds: Sequence[int] = (0,), shared: int | None = None) -> None:
        if not seeds or not all(whole(seed) is not None and 0 <= seed < 2**63 for seed in seeds):
            raise InputError(f"a simulator needs a seed for each run, whole numbers >= 0, got {list(seeds)}")
        self.topology = topology
        self.seeds = tuple(seeds)
        self.shared = shared
        self._seeds = torch.tensor(self.seeds)
        self._deltas: dict[tuple[int, torch.dtype, torch.device], Tensor | None] = {}

    @property
    def rows(self) -> int:
        """How many rows x has: nodes × runs."""
        return self.topology.n * len(self.seeds)

    def step(
        self,
        algorithm: Algorithm,
        x: Tensor,
        g: Tensor,
        state: State,
        *,
        t: int,
        lr: Tensor,
        full_gradient: Callable[[Tensor], Tensor],
        time: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """One step of all nodes: the new x and the new state. `time` is t as a tensor that lives on."""
        if time is None:
            time = torch.tensor(t, dtype=x.dtype, device=x.device)
        return self.advance(algorithm, x, g, dict(state), StepNode(t, time, lr, self, full_gradient))

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """How the algorithm is called; an engine that owns its storage does more."""
        return algorithm.step(x, g, state, node)

    def mix(self, t: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """v + (W − I)(v − v₀) of each tensor, v₀ the run's first row, in full precision whatever is around.

        Quasi-global momentum divides a small difference of two mixed models by the learning rate: a
        rounding of TF32 or bf16 here exceeds the gradient after two decays. Since (W − I)1 = 0, taking v₀ off
        changes nothing but the rounding, which is then that of the nodes' differences; nodes that agree
        stay bit for bit where they are.
        """
        delta = self._delta(t, tensors[0])
        if delta is None:
            return tensors
        with full_precision(tensors[0].device.type):
            return tuple(self._on_shared(v, lambda rows: _addmm(rows, delta)) for v in tensors)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """The mean of each run's rows, at each of its rows."""
        if among is None:
            return self._on_shared(tensor, lambda rows: rows.mean(dim=1, keepdim=True))
        weights = among.view(len(self.seeds), self.topology.n, 1)
        return self._on_shared(
            tensor, lambda rows: (weights * rows).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        )

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """At least one node of each run, drawn from (the run's seed, draw)."""
        n = self.topology.n
        if self._seeds.device != draw.device:
            self._seeds = self._seeds.to(draw.device)
        chosen = choose(self._seeds, draw, n, max(1, round(fraction * n)))
        return chosen.to(draw.dtype).view(self.rows, 1)

    def _on_shared(self, v: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`function` of the [runs, n, columns] view of v's shared columns; the others stay."""
        columns = v.shape[1] if self.shared is None else self.shared
        if columns > v.shape[1]:
            raise InputError(f"{columns} columns are shared, but x has {v.shape[1]}; share fewer")
        rows = v[:, :columns].reshape(len(self.seeds), self.topology.n, columns)
        result = function(rows).expand_as(rows).reshape(self.rows, columns)
        return result if columns == v.shape[1] else torch.cat([result, v[:, columns:]], dim=1)

    def _delta(self, t: int, like: Tensor) -> Tensor | None:
        """W(t) − I as a tensor, or None for a step without gossip."""
        key = ((t - 1) % self.topology.period, like.dtype, like.device)
        if key not in self._deltas:
            delta = self.topology.weights(t) - np.eye(self.topology.n)
            self._deltas[key] = torch.from_numpy(delta).to(like) if delta.any() else None
        return self._deltas[key]


def warn_of_w(algorithm: Algorithm, topology: Topology) -> None:
    """Say where W is not what the algorithm needs."""
    needs = algorithm.needs
    if needs.doubly_stochastic and not topology.is_doubly_stochastic:
        effect = "has negative weights" if topology.keeps_mean else "makes the nodes' mean drift to a weighted one"
        warnings.warn(
            f"W of {topology} is not doubly stochastic: it {effect}; use Metropolis weights, as from_graph does",
            stacklevel=3,
        )
    bound, lambda_min = needs.lambda_min_above, topology.lambda_min
    if bound is not None and (lambda_min is None or lambda_min <= bound + TOLERANCE):
        what = (
            f"a fixed symmetric W, which {topology} is not: it may diverge; use a fixed undirected graph"
            if lambda_min is None
            else f"every eigenvalue of W above {bound:.4g}, but λ_min of {topology} is {lambda_min:.4g}: "
            f"it may diverge; use (I + W)/2, the topology lazy/{topology}"
        )
        warnings.warn(f"{type(algorithm).__name__} needs {what}", stacklevel=3)


def _addmm(rows: Tensor, delta: Tensor) -> Tensor:
    """rows + delta @ (rows − their first) for each run of a [runs, n, columns] tensor."""
    apart = rows - rows[:, :1]
    if len(rows) == 1:
        return torch.addmm(rows[0], delta, apart[0])[None]
    return torch.baddbmm(rows, delta.expand(len(rows), *delta.shape), apart)


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Matrix products in the precision of their operands: no autocast, no TF32, no bf16."""
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
