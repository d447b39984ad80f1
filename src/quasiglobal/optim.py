"""`torch.optim.Optimizer` that runs any algorithm inside your own training loop, under torchrun."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from quasiglobal import algorithms
from quasiglobal.algorithms import Algorithm, State
from quasiglobal.algorithms.needs import needs_of
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.needs import check_needs
from quasiglobal.errors import InputError
from quasiglobal.peers.rendezvous import Meeting, Store, all_gather, join
from quasiglobal.stacked.step_blocks import ModelRows
from quasiglobal.topology import Topology, parse

Loss: TypeAlias = Any
"""Return type of a closure: a tensor or a number."""

Closure = Callable[[], Loss]

COUNT = itertools.count()
"""Numbers the optimizers of this process, in the same order in every process."""


class GossipOptimizer(torch.optim.Optimizer):
    """One node of a decentralized run: `step` updates this process's model and averages it with the neighbours'.

    Parameter groups may have their own lr and weight_decay. Parameters that need no gradient are not changed. Every
    node starts from node 0's parameters. In your own training loop, under `torchrun --nproc-per-node 8 train.py`:

        optimizer = qg.optim.GossipOptimizer(model.parameters(), "qg-dsgdm-n", "ring:8", lr=0.1)

    With `base`, any torch optimizer makes the local step, and `dsgd` averages the results, x_i ← Σ_j w_ij base(x_j):

        params = list(model.parameters())           # a list, since both optimizers read it
        base = torch.optim.AdamW(params, lr=1e-3)
        optimizer = qg.optim.GossipOptimizer(params, "dsgd", "ring:8", base=base)

    Call `step` on this optimizer only. `param_groups` and `state` are the base's own, so a scheduler of either
    optimizer changes both. The base's buffers stay on their node; only parameters are averaged. `d2+`, `ed`, `k-gt`,
    `led`, `proxskip`, `gossip-pga`, `relaysgd`, `lt-admm`, and `slowmo` around any of them, such as `slowmo:base=dsgd`,
    also accept a base; the other algorithms refuse it with the reason. All but `gossip-pga` and `slowmo` correct the
    base's direction, so they reach the exact minimiser with SGD or momentum as base, but not with Adam.

    Args:
        params: parameters or groups, as for every torch optimizer.
        algorithm: a name with options, as `qg algorithms` lists them, or an `Algorithm`.
        topology: a name, as `qg topology` accepts it, or a `Topology`, with one node per process.
        lr: learning rate of groups without their own, 0.1 by default; schedulers change it as usual.
        weight_decay: L2 factor, added to the gradient, of groups without their own; 0 by default.
        base: torch optimizer of the same parameters that makes the local step, with its own lr and weight_decay.
        overlap: send the models while the next gradient is computed, and average them before the local step
            (`qg.algorithms.Overlap`). Set parameters by hand only before the first step: changes made between two steps
            reach the neighbours one step later.
        timeout: seconds to wait for a neighbour before continuing without it.
        host: address of this machine that its neighbours can reach.
        meeting: (store, rank, number of processes), if not started by torchrun.
    """

    def __init__(
        self,
        params: ParamsT,
        algorithm: str | Algorithm | type[Algorithm],
        topology: str | Topology,
        lr: float | None = None,
        weight_decay: float | None = None,
        *,
        base: torch.optim.Optimizer | None = None,
        overlap: bool = False,
        timeout: float = 60.0,
        host: str = "127.0.0.1",
        meeting: tuple[Store, int, int] | None = None,
    ) -> None:
        self.algorithm, self.topology, self.base = algorithms.algorithm(algorithm), parse(topology), base
        if overlap:
            self.algorithm = algorithms.Overlap(base=self.algorithm)
        if base is None:
            super().__init__(params, {"lr": 0.1 if lr is None else lr, "weight_decay": weight_decay or 0.0})
        else:
            _check_base(base, algorithm, self.algorithm, lr, weight_decay)
            given: list[Any] = list(params)
            if not given:
                raise InputError("params is empty: base has used up the generator; pass "
                                 "params = list(model.parameters()) to both optimizers")
            super().__init__(given, {})                 # parses the groups; the base's replace them below
            _check_same_parameters(self, base)
            self._share_groups(base)
            base.register_load_state_dict_post_hook(self._share_groups)
        check_needs(self.algorithm, self.topology)
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
            self.topology, Meeting(store, f"optimizer/{next(COUNT)}"), rank, [(node,) for node in range(size)],
            timeout=timeout, host=host,
        ).connect()
        self.steps = 0
        self._options: dict[str, tuple[list[tuple[float, int]], Tensor]] = {}
        self._write(self.engine.broadcast(self._row()))
        state = self.engine.begin(self.algorithm, self._row())
        self._state: State = {name: value.clone() for name, value in state.items()}

    _step_supports_amp_scaling = True
    """Marks that `step`, not the gradient scaler, unscales gradients and handles overflows."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Loss:
        """Run one step of this node.

        If a gradient scaler reports an overflow, the step has gradient 0 and keeps the algorithm's state, or the base
        makes no step. It still mixes, since the neighbours wait for this node's message.
        """
        overflow = getattr(self, "found_inf", None)
        failed = overflow is not None and bool(overflow)
        if self.base is None:
            loss, g, weight_decay = self._with_gradient(closure, failed)
        else:
            loss, g, weight_decay = self._with_base(self.base, closure, failed)
        self.steps += 1
        follows = self.base is not None or needs_of(self.algorithm).follows_messages  # a base keeps gradients out of it
        x = self._parameters()
        self.engine.step_in_place(
            self.algorithm, x, g, self._state, t=self.steps, lr=self._of_groups("lr"),
            gradient=partial(self._gradient_at, closure), full_gradient=_no_full_gradient, weight_decay=weight_decay,
            keeps_state=failed and not follows, ahead=isinstance(self.algorithm, algorithms.Overlap),
        )
        if x.pieces[0].data_ptr() != self._trained[0].data_ptr():
            self._write(x.whole())
        return loss

    @torch.no_grad()
    def average(self, rounds: int | None = None) -> None:
        """Replace the model by the exact mean over all nodes or, if `rounds` is given, gossip for that many rounds."""
        x = self._row()
        if rounds is None:
            if isinstance(self.algorithm, algorithms.Overlap):
                self.engine.mix(self.steps + 1, (x,))       # the models sent ahead are used up: the mean replaces them
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

    def state_dict(self) -> StateDict:
        """Return a copy of the usual optimizer state (the base's, if any), the algorithm's state and the step count."""
        own = {
            "steps": self.steps, "state": {name: value.clone() for name, value in self._state.items()},
            "base": self._base_class,
        }
        usual = super().state_dict() if self.base is None else copy.deepcopy(self.base.state_dict())
        return usual | {"gossip": own}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the output of `state_dict`."""
        own = state_dict.get("gossip", {})
        fits = {name: value.shape for name, value in own.get("state", {}).items()}
        expected = {name: value.shape for name, value in self._state.items()}
        if "steps" not in own or fits != expected or own.get("base") != self._base_class:
            raise InputError("the state is of another algorithm, model or base; load a state that this optimizer saved")
        usual = {name: value for name, value in state_dict.items() if name != "gossip"}
        if self.base is None:
            super().load_state_dict(usual)
        else:
            self.base.load_state_dict(usual)
        self.steps = own["steps"]
        self._state = {name: value.clone().to(self._state[name]) for name, value in own["state"].items()}

    @property
    def _base_class(self) -> str | None:
        return None if self.base is None else type(self.base).__qualname__

    def _share_groups(self, base: torch.optim.Optimizer) -> None:
        """Take the base's groups, state and defaults as this optimizer's own; loading a state replaces them there."""
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    def _with_gradient(self, closure: Closure | None, failed: bool) -> tuple[Loss, ModelRows, float | Tensor]:
        """The closure's loss, the unscaled gradient, 0 after an overflow, and the weight decay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        g = self._zeros() if failed else self._gradients()
        if closure is not None or (scale is not None and not failed):
            row = g.whole() if scale is None or failed else g.whole() / scale
            g = ModelRows([row.clone()])                    # a closure may be called again, and change the gradients
        decays = any(group["weight_decay"] for group in self.param_groups)
        return loss, g, self._of_groups("weight_decay") if decays else 0.0

    def _gradient_at(self, closure: Closure | None, y: Tensor) -> Tensor:
        """The gradient that the closure computes with the parameters y; it restores the parameters."""
        if closure is None or self.base is not None:
            raise InputError("this algorithm needs the gradient at further points: call step(closure), without a base")
        own = self._row()
        self._write(y)
        with torch.enable_grad():
            closure()
        self._write(own)
        return self._gradients().whole().clone()

    def _with_base(
        self, base: torch.optim.Optimizer, closure: Closure | None, failed: bool
    ) -> tuple[Loss, ModelRows, float]:
        """Step the base on the unscaled gradients, except after an overflow; return its loss, and zeros as above."""
        known, scale = set(map(id, self._trained)), getattr(self, "grad_scale", None)
        trained = [p for group in base.param_groups for p in group["params"] if p.requires_grad]
        if any(id(p) not in known for p in trained):
            raise InputError("parameters were added to the base or unfrozen later, but neighbours expect messages of "
                             "one size; make a new GossipOptimizer")
        if closure is not None and hasattr(self, "found_inf"):
            raise InputError("a gradient scaler does not support closures; call backward before scaler.step(optimizer)")
        loss = None
        if not failed:
            for p in trained:
                if p.grad is not None and scale is not None:
                    p.grad.div_(scale)
            loss = base.step() if closure is None else base.step(closure)
        return loss, self._zeros(), 0.0

    def _parameters(self) -> ModelRows:
        """The trained parameters side by side, without a copy; or a copy in one piece, if some are not contiguous."""
        if not all(p.is_contiguous() for p in self._trained):
            return ModelRows([self._row()])
        return ModelRows([p.detach().view(1, -1) for p in self._trained])

    def _zeros(self) -> ModelRows:
        """Gradients that are 0, without memory."""
        return ModelRows([self._trained[0].new_zeros(()).expand(1, sum(p.numel() for p in self._trained))])

    def _gradients(self) -> ModelRows:
        """The gradients of the trained parameters, side by side; a missing gradient counts as 0."""
        zero = self._trained[0].new_zeros(())
        values = (zero.expand(p.shape) if p.grad is None else p.grad.to(p.dtype) for p in self._trained)
        return ModelRows([value.reshape(1, -1) for value in values])

    def _row(self) -> Tensor:
        """A copy of the trained parameters, [1, d]."""
        return torch.cat([p.detach().reshape(1, -1) for p in self._trained], dim=1)

    def _write(self, row: Tensor) -> None:
        sizes = [p.numel() for p in self._trained]
        for p, value in zip(self._trained, torch.split(row[0], sizes), strict=True):
            p.detach().copy_(value.view_as(p))

    def _of_groups(self, name: str) -> Tensor:
        """The option `name` of the parameter groups: a scalar if all groups have the same value, otherwise [1, d].

        A base without lr counts as lr 1: with gradient 0, no algorithm depends on the value of a constant lr.
        """
        first = self._trained[0]
        values = [
            (float(group.get(name, 1.0)), sum(p.numel() for p in group["params"] if p.requires_grad))
            for group in self.param_groups
        ]
        if len({value for value, _ in values}) == 1:
            return torch.tensor(values[0][0], dtype=first.dtype, device=first.device)
        known, row = self._options.get(name, (None, None))
        if row is None or known != values:          # the cached row is stale: a scheduler changed a group
            row = torch.cat([first.new_full((count,), value) for value, count in values])[None]
            self._options[name] = values, row
        return row

    def _check_alike(self, store: Store, rank: int, size: int, timeout: float) -> None:
        """Raise unless every node has the same architecture, algorithm, topology and base."""
        shapes = [tuple(p.shape) for p in self._trained]
        facts = f"{shapes} {self._trained[0].dtype} {self.algorithm!r} {self.topology.fingerprint} "
        if self.base is not None:                   # comparable between processes: numbers, and no functions
            options = {
                name: value.tolist() if isinstance(value, Tensor) else value
                for name, value in sorted(self.defaults.items()) if not callable(value)
            }
            facts += f"{self._base_class} {options}"
        mine = hashlib.sha256(facts.encode()).hexdigest()
        theirs = all_gather(store, "alike", mine, rank, size, timeout)
        strange = [node for node, digest in enumerate(theirs) if digest != mine]
        if strange:
            raise InputError(f"nodes {strange} hold another architecture, algorithm, topology or base optimizer than "
                             f"node {rank}; run the same script in all processes")


def _no_full_gradient(x: Tensor) -> Tensor:
    raise InputError("this algorithm needs the gradient over all of a node's data, which an optimizer cannot compute; "
                     "use `qg train`")


def _check_base(
    base: torch.optim.Optimizer, given: str | Algorithm | type[Algorithm], algorithm: Algorithm,
    lr: float | None, weight_decay: float | None,
) -> None:
    """Raise unless `base` is an optimizer that `algorithm` accepts, without a second lr or weight_decay."""
    if not isinstance(base, torch.optim.Optimizer) or isinstance(base, GossipOptimizer):
        raise InputError(f"base must be a torch optimizer, such as torch.optim.AdamW(params), got {base!r}")
    if lr is not None or weight_decay is not None:
        raise InputError(f"with base, lr and weight_decay are the base's; give them to {type(base).__name__} instead")
    if reason := needs_of(algorithm).refuses_base:
        name = given if isinstance(given, str) else type(algorithm).__name__
        raise InputError(f"{name} does not accept a base: it {reason}; "
                         "use dsgd, d2+ or slowmo:base=dsgd, or omit base")


def _check_same_parameters(own: torch.optim.Optimizer, base: torch.optim.Optimizer) -> None:
    """Raise unless both optimizers hold the same trainable parameters, in any order."""
    given, held = (
        {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        for optimizer in (own, base)
    )
    if given != held:
        raise InputError(f"{len(given - held)} trainable parameters of params are not in base, and {len(held - given)} "
                         "of base are not in params; pass the same list to both optimizers")
