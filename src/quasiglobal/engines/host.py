"""Base class of engines: an engine hosts nodes of one or several runs as rows of every tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.node import StepNode, choose
from quasiglobal.errors import InputError, whole
from quasiglobal.topology import Topology


class Host(ABC):
    """Base class of engines. Row r·k + i of every tensor is the i-th of the k nodes hosted here, of run r.

    `mix` and `mean` act within a run. Only the first `shared` columns are communicated (default: all). With `rounded`,
    they are rounded to bfloat16, r(v): mixing is then v + (W − I) r(v), which preserves the mean and leaves nodes
    that agree unchanged.
    """

    waits_for_nobody = False
    """Whether a step needs no message from other processes, so that it can be captured as a CUDA graph."""

    def __init__(
        self,
        topology: Topology,
        *,
        nodes: Sequence[int] | None = None,
        seeds: Sequence[int] = (0,),
        shared: int | None = None,
        rounded: bool = False,
    ) -> None:
        if not seeds or not all(whole(seed) is not None and 0 <= seed < 2**63 for seed in seeds):
            raise InputError(f"an engine needs a seed for each run, whole numbers >= 0, got {list(seeds)}")
        self.topology = topology
        self.nodes = tuple(range(topology.n) if nodes is None else nodes)
        self.seeds = tuple(seeds)
        self.shared, self.rounded = shared, rounded
        self._seeds = torch.tensor(self.seeds)

    @property
    def rows(self) -> int:
        """Number of rows of x here: hosted nodes × runs."""
        return len(self.nodes) * len(self.seeds)

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
        weight_decay: float | Tensor = 0.0,
        time: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Run one step of all hosted nodes; return the new x and the new state.

        Weight decay, a number or a tensor that broadcasts to x, is added to every gradient here and nowhere else.
        `time` is t as a tensor that persists between steps, for a captured step.
        """
        if time is None:
            time = torch.tensor(t, dtype=x.dtype, device=x.device)

        def full(at: Tensor) -> Tensor:
            return full_gradient(at) + weight_decay * at

        if isinstance(weight_decay, Tensor):
            g = g + weight_decay * x
        elif weight_decay:
            g = torch.add(g, x, alpha=weight_decay)         # one pass; golden results depend on its rounding
        return self.advance(algorithm, x, g, dict(state), StepNode(t, time, lr, self, full))

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """Call the algorithm; subclasses may wrap the call."""
        stepped = algorithm.step(x, g, state, node)
        if not isinstance(stepped, tuple) or len(stepped) != 2:
            raise InputError(
                f"step of {type(algorithm).__name__} returns a {type(stepped).__name__}; it has to return (x, state)"
            )
        return stepped

    def prepare(self, t: int, like: Tensor) -> None:
        """Move to the device of x what step t needs there, so that the step can be traced without computing it."""
        self._seeds = self._seeds.to(like.device)

    @abstractmethod
    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Average each tensor with the neighbours' by W(t); `time` is t as a tensor, for a captured step."""

    @abstractmethod
    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return, at each row here, the exact mean over the run's nodes, or over the nodes in the mask `among`."""

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """Return a mask of the rows here: a fraction of each run's nodes, at least one, drawn from (run seed, draw)."""
        n = self.topology.n
        if self._seeds.device != draw.device:
            self._seeds = self._seeds.to(draw.device)
        chosen = choose(self._seeds, draw, n, max(1, round(fraction * n)))
        return chosen[:, list(self.nodes)].to(draw.dtype).view(self.rows, 1)

    def by_run(self, v: Tensor) -> Tensor:
        """Return v's shared columns as [runs, nodes here, columns]."""
        columns = v.shape[1] if self.shared is None else self.shared
        if columns > v.shape[1]:
            raise InputError(f"{columns} columns are shared, but x has {v.shape[1]}; share fewer")
        return v[:, :columns].reshape(len(self.seeds), len(self.nodes), columns)

    def told(self, rows: Tensor) -> Tensor:
        """Return the rows as neighbours receive them."""
        return rows.bfloat16().to(rows.dtype) if self.rounded else rows

    def with_own(self, shared: Tensor, v: Tensor) -> Tensor:
        """Return v with its shared columns replaced; the other columns stay."""
        result = shared.expand(len(self.seeds), len(self.nodes), -1).reshape(self.rows, -1)
        return result if result.shape[1] == v.shape[1] else torch.cat([result, v[:, result.shape[1] :]], dim=1)
