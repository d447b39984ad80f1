"""`torch.optim.Optimizer` that runs any algorithm inside your own training loop, under torchrun."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from quasiglobal import algorithms
from quasiglobal.algorithms import Algorithm, State
from quasiglobal.engines.distributed.engine import Distributed
from quasiglobal.engines.distributed.gloo import Meeting, Store
from quasiglobal.engines.distributed.rendezvous import all_gather, join
from quasiglobal.engines.simulator import warn_of_w
from quasiglobal.errors import InputError
from quasiglobal.topology import Topology, parse


class GossipOptimizer(torch.optim.Optimizer):
    """One node of a decentralized run: `step` updates this process's model and averages it with the neighbours'.

    Parameter groups may have their own lr and weight_decay. Parameters that need no gradient are not changed. Every
    node starts from node 0's parameters. In your own training loop, under `torchrun --nproc-per-node 8 train.py`:

        optimizer = qg.optim.GossipOptimizer(model.parameters(), "qg-dsgdm-n", "ring:8", lr=0.1)

    Args:
        params: parameters or groups, as for every torch optimizer.
        algorithm: a name with options, as `qg algorithms` lists them, or an `Algorithm`.
        topology: a name, as `qg topology` accepts it, or a `Topology`, with one node per process.
        lr: learning rate of groups without their own; schedulers change it as usual.
        weight_decay: L2 factor, added to the gradient, of groups without their own.
        timeout: seconds to wait for a neighbour before continuing without it.
        host: address of this machine that its neighbours can reach.
        meeting: (store, rank, number of processes), if not started by torchrun.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        algorithm: str | Algorithm | type[Algorithm],
        topology: str | Topology,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        *,
        timeout: float = 60.0,
        host: str = "127.0.0.1",
        meeting: tuple[Store, int, int] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.algorithm, self.topology = algorithms.algorithm(algorithm), parse(topology)
        warn_of_w(self.algorithm, self.topology)
        self._trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        kinds = {(p.dtype, p.device) for p in self._trained}
        if len(kinds) != 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise InputError(f"all parameters must have one dtype, float32 or float64, and one device, got {found}")
        store, rank, size = meeting or join(timeout)
        if size != self.topology.n:
            raise InputError(f"{self.topology} has {self.topology.n} nodes, but there are {size} processes")
        self._check_alike(store, rank, size, timeout)
        self.engine = Distributed(
            self.topology, Meeting(store, "optimizer"), rank, [(node,) for node in range(size)],
            timeout=timeout, host=host,
        ).connect()
        self.steps = 0
        self._rows: dict[str, tuple[list[tuple[float, int]], Tensor]] = {}
        self._write(self.engine.broadcast(self._row()))
        self._state: State = self.algorithm.init(self._row())

    _step_supports_amp_scaling = True
    """Marks that `step`, not the gradient scaler, unscales gradients and handles overflows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of this node.

        If a gradient scaler reports an overflow, the step has gradient 0 and keeps the algorithm's state. It still
        mixes, since the neighbours wait for this node's message.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        x, g = self._row(), self._row(gradient=True)
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            g = g / scale
        failed = overflow is not None and bool(overflow)
        if failed:
            g = torch.zeros_like(g)
        decays = any(group["weight_decay"] for group in self.param_groups)
        self.steps += 1
        x, state = self.engine.step(
            self.algorithm, x, g, self._state, t=self.steps, lr=self._of_groups("lr"),
            full_gradient=_no_full_gradient, weight_decay=self._of_groups("weight_decay") if decays else 0.0,
        )
        self._write(x)
        if not failed:
            self._state = {name: value.clone() for name, value in state.items()}
        return loss

    @torch.no_grad()
    def average(self, rounds: int | None = None) -> None:
        """Replace the model by the exact mean over all nodes or, if `rounds` is given, gossip for that many rounds."""
        x = self._row()
        if rounds is None:
            x = self.engine.mean(x, None)
        for _ in range(rounds or 0):
            self.steps += 1
            (x,) = self.engine.mix(self.steps, (x,))
        self._write(x)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; allowed in the constructor only, since the flattened row that is gossiped has a fixed size."""
        if hasattr(self, "_trained"):
            raise InputError("parameters cannot be added later: neighbours expect messages of one size")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the usual optimizer state, plus the algorithm's state and the step count."""
        own = {"steps": self.steps, "state": {name: value.clone() for name, value in self._state.items()}}
        return super().state_dict() | {"gossip": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the output of `state_dict`."""
        own = state_dict.get("gossip", {})
        fits = {name: value.shape for name, value in own.get("state", {}).items()}
        if fits != {name: value.shape for name, value in self._state.items()}:
            raise InputError("the state is of another algorithm or model; load a state that this optimizer saved")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "gossip"})
        self.steps = own["steps"]
        self._state = {name: value.clone().to(self._state[name]) for name, value in own["state"].items()}

    def _row(self, gradient: bool = False) -> Tensor:
        """The trained parameters flattened to [1, d], or their gradients; a missing gradient counts as 0."""
        values = (
            (p.grad if p.grad is not None else torch.zeros_like(p)) if gradient else p.detach() for p in self._trained
        )
        return torch.cat([value.reshape(-1).to(self._trained[0].dtype) for value in values])[None]

    def _write(self, row: Tensor) -> None:
        sizes = [p.numel() for p in self._trained]
        for p, value in zip(self._trained, torch.split(row[0], sizes), strict=True):
            p.detach().copy_(value.view_as(p))

    def _of_groups(self, name: str) -> Tensor:
        """The option `name` of the parameter groups: a scalar if all groups have the same value, otherwise [1, d]."""
        first = self._trained[0]
        values = [
            (float(group[name]), sum(p.numel() for p in group["params"] if p.requires_grad))
            for group in self.param_groups
        ]
        if len({value for value, _ in values}) == 1:
            return torch.tensor(values[0][0], dtype=first.dtype, device=first.device)
        known, row = self._rows.get(name, (None, None))
        if row is None or known != values:          # the cached row is stale: a scheduler changed a group
            row = torch.cat([first.new_full((count,), value) for value, count in values])[None]
            self._rows[name] = values, row
        return row

    def _check_alike(self, store: Store, rank: int, size: int, timeout: float) -> None:
        """Raise unless every node has the same architecture, algorithm and topology."""
        shapes = [tuple(p.shape) for p in self._trained]
        facts = f"{shapes} {self._trained[0].dtype} {self.algorithm!r} {self.topology.fingerprint}"
        mine = hashlib.sha256(facts.encode()).hexdigest()
        theirs = all_gather(store, "alike", mine, rank, size, timeout)
        strange = [node for node, digest in enumerate(theirs) if digest != mine]
        if strange:
            raise InputError(f"nodes {strange} hold another architecture, algorithm or topology than node {rank}")


def _no_full_gradient(x: Tensor) -> Tensor:
    raise InputError("this algorithm needs the gradient over all of a node's data, which an optimizer cannot compute; "
                     "use `qg train`")
