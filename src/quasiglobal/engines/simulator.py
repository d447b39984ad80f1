"""Simulator: all nodes in one process, as rows of one tensor; several runs may be stacked as further rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm
from quasiglobal.common.mixing import TOLERANCE
from quasiglobal.engines.faults import Faults
from quasiglobal.engines.host import Host
from quasiglobal.errors import InputError
from quasiglobal.gradients.precision import full_precision
from quasiglobal.topology import Topology


class Simulator(Host):
    """Engine with all nodes: row r·n + i of every tensor is node i of run r. `drop`, `churn`: see `Faults`.

    >>> from quasiglobal import topology
    >>> engine = Simulator(topology.complete(2), seeds=(0, 1), shared=1)
    >>> x = torch.tensor([[0.0, 5.0], [2.0, 6.0], [10.0, 7.0], [30.0, 8.0]])
    >>> engine.mix(1, (x,))[0].tolist()
    [[1.0, 5.0], [1.0, 6.0], [20.0, 7.0], [20.0, 8.0]]
    """

    waits_for_nobody = True

    def __init__(
        self,
        topology: Topology,
        *,
        seeds: Sequence[int] = (0,),
        shared: int | None = None,
        rounded: bool = False,
        drop: float = 0.0,
        churn: float = 0.0,
    ) -> None:
        super().__init__(topology, seeds=seeds, shared=shared, rounded=rounded)
        self.faults = Faults(drop, churn)
        self._deltas: dict[tuple[int, torch.dtype, torch.device], Tensor | None] = {}
        self._sparse: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor] | None] = {}

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return v + (W − I)(v − v₀) for each tensor, v₀ the run's first row, always in full precision.

        Quasi-global momentum divides a small difference of two mixed models by the learning rate: a
        TF32 or bf16 rounding error here exceeds the gradient after two decays. Since (W − I)1 = 0, subtracting v₀
        changes only the rounding error, which then scales with the differences between nodes; nodes that agree
        stay bit-identical. On large sparse graphs (`NODES_PER_NEIGHBOUR`), neighbours are added one by one.

        The weight of a lost message returns to the receiver, v_i + Σ_j w_ij (v_j − v_i) over the messages that
        arrive, as in the distributed engine: W's rows still sum to 1, its columns need not, and the mean moves.
        """
        like = tensors[0]
        if not self.faults and (neighbours := self._neighbours(t, like.dtype, like.device)):
            return tuple(self.with_own(self._gathered(self.by_run(v), *neighbours), v) for v in tensors)
        delta = self._delta(t, torch.float64 if self.faults else like.dtype, like.device)
        if delta is None:
            return tensors
        if self.faults:
            now = torch.tensor(t, device=like.device) if time is None else time
            delta = self._arriving(now, delta).to(like.dtype)
        with full_precision(like.device.type):
            return tuple(self.with_own(self._addmm(self.by_run(v), delta), v) for v in tensors)

    def prepare(self, t: int, like: Tensor) -> None:
        super().prepare(t, like)
        self._neighbours(t, like.dtype, like.device)
        self._delta(t, torch.float64 if self.faults else like.dtype, like.device)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return the mean of each run's rows, in every row of the run."""
        if self.faults:
            raise InputError(NO_MEAN)
        rows = self.by_run(tensor)
        if among is None:
            return self.with_own(rows.mean(dim=1, keepdim=True), tensor)
        weights = among.view(len(self.seeds), self.topology.n, 1)
        return self.with_own((weights * rows).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True), tensor)

    def _delta(self, t: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """W(t) − I as a tensor, or None for a step without gossip."""
        key = ((t - 1) % self.topology.period, dtype, device)
        if key not in self._deltas:
            delta = self.topology.weights(t) - np.eye(self.topology.n)
            self._deltas[key] = torch.from_numpy(delta).to(device, dtype) if delta.any() else None
        return self._deltas[key]

    def _addmm(self, rows: Tensor, delta: Tensor) -> Tensor:
        """Return rows + delta @ (rows − first row) per run of [runs, n, columns]; delta is [n, n] or [runs, n, n]."""
        told = self.told(rows)
        apart = told - told[:, :1]
        if len(rows) == 1:
            return torch.addmm(rows[0], delta.view(delta.shape[-2:]), apart[0])[None]
        return torch.baddbmm(rows, delta.expand(len(rows), *delta.shape[-2:]), apart)

    def _gathered(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return v_i + Σ_j w_ij (v_j − v_i) for each run of [runs, n, columns]; add one neighbour j at a time."""
        told, mixed = self.told(rows), rows
        for j in range(index.shape[1]):
            mixed = torch.addcmul(mixed, weights[:, j, None], told.index_select(1, index[:, j]) - told)
        return mixed

    def _neighbours(self, t: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return each node's neighbours in W(t) and their weights, [n, degree]; None if a matrix product is faster."""
        key = ((t - 1) % self.topology.period, dtype, device)
        if key not in self._sparse:
            weights = self.topology.weights(t) * (1 - np.eye(self.topology.n))
            degree = int((weights != 0).sum(axis=1).max())
            self._sparse[key] = None
            if 0 < degree * NODES_PER_NEIGHBOUR < self.topology.n:
                index = np.argsort(weights == 0, axis=1, kind="stable")[:, :degree]
                values = np.take_along_axis(weights, index, axis=1)
                self._sparse[key] = (torch.from_numpy(index).to(device), torch.from_numpy(values).to(device, dtype))
        return self._sparse[key]

    def _arriving(self, time: Tensor, delta: Tensor) -> Tensor:
        """Return W − I as [runs, n, n], with the weights of messages lost at this step moved to the diagonal."""
        if self._seeds.device != delta.device:
            self._seeds = self._seeds.to(delta.device)
        weights = delta - torch.diag(delta.diagonal())
        weights = weights * self.faults.arrived(self._seeds, time, self.topology.n)
        return weights - torch.diag_embed(weights.sum(dim=2))


NODES_PER_NEIGHBOUR = 180
"""Nodes per neighbour above which adding neighbours one by one beats a product with W, measured on an H200.

A row of the product costs n multiplications; each neighbour added costs some passes over memory.
"""

NO_MEAN = (
    "an exact mean over all nodes needs every node: with drop or churn, "
    "use an algorithm that communicates with neighbours only (see `qg algorithms`)"
)


def warn_of_w(algorithm: Algorithm, topology: Topology) -> None:
    """Warn if W lacks a property that the algorithm needs."""
    needs = algorithm.needs
    if needs.doubly_stochastic and not topology.is_doubly_stochastic:
        effect = "has negative weights" if topology.keeps_mean else "makes the nodes' mean drift to a weighted mean"
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
