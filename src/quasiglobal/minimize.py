"""Run any algorithm on any gradient function in one call, for toy problems, tests and research."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from quasiglobal import algorithms
from quasiglobal.algorithms import Algorithm, State
from quasiglobal.algorithms.needs import needs_of
from quasiglobal.engines.host import Host
from quasiglobal.engines.needs import check_needs
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.wire import checked_wire
from quasiglobal.errors import InputError, whole
from quasiglobal.topology.parsing import Graph, parse

Gradient = Callable[[Tensor, int], object]
"""gradient(x, t) → [n, d]: row i is node i's gradient at row i of x, at step t = 1, 2, …"""

LearningRate = float | Tensor | Callable[[int], float | Tensor]
"""A number, a tensor that broadcasts to [n, d], or a function of t = 1, 2, …"""


@dataclass(frozen=True)
class Result:
    """State of a run after its last step."""

    x: Tensor
    """[n, d], the last iterate."""
    history: Tensor
    """[steps + 1, n, d], the iterates from x0 on; only the last iterate, [1, n, d], if no history was kept."""
    state: State
    """The algorithm's state after the last step."""
    steps: int
    """Number of steps done."""


class Diverged(ArithmeticError):
    """A gradient or an iterate is not finite. `result` holds everything up to the previous step."""

    def __init__(self, what: str, step: int, run: int, node: int, result: Result) -> None:
        where = f"step {step}, node {node}" + (f" of run {run}" if run else "")
        super().__init__(
            f"{what} is not finite at {where}; the {step - 1} steps before it are in `.result`; "
            "try a smaller learning rate"
        )
        self.step, self.run, self.node, self.result = step, run, node, result


def minimize(
    gradient: Gradient | None,
    x0: ArrayLike | Tensor,
    algorithm: str | Algorithm | type[Algorithm],
    topology: Graph,
    lr: LearningRate,
    steps: int,
    weight_decay: float | Tensor = 0.0,
    *,
    full_gradient: Callable[[Tensor], object] | None = None,
    seed: int = 0,
    wire: str = "full",
    drop: float = 0.0,
    churn: float = 0.0,
    weights: ArrayLike | None = None,
    resume: Result | None = None,
    keep_history: bool = True,
    engine: Host | None = None,
) -> Result:
    """Minimise the mean of n functions, one per node; each node communicates only with its neighbours.

    Args:
        gradient: gradient(x, t) → [n, d]; None means 0, since the gossip algorithms need no gradient.
        x0: starting point, [n, d], or [d] for the same start at every node. The run has its dtype, float32 or float64.
        algorithm: a name with options, as `qg algorithms` lists them, or an `Algorithm`.
        topology: a name, as `qg topology` accepts it, a `Topology` or a networkx graph.
        lr: a number, a tensor that broadcasts to [n, d], or a function lr(t) of t = 1, 2, …
        steps: total number of steps, including those before a resume. (`Experiment.steps`, in `qg.train` and on the
            command line, is the number of steps of one epoch.)
        weight_decay: L2 factor, added to the gradient as weight_decay · x; a number, or a tensor like lr.
        full_gradient: full_gradient(x) → [n, d], each node's gradient over all of its data, used by `mimelite`.
            By default the gradient at the same step.
        seed: random seed from which `mimelite` samples its clients, and `proxskip` draws its steps with gossip.
        wire: format of the messages: full, bf16, or for `choco`, `adagossip`, `beer` and `motef` topk:0.01, randk:0.01,
            sign or qsgd:4.
        drop: probability that a message is lost, for each direction of a link, drawn from the seed.
        churn: probability that a node is absent for 20 steps.
        weights: weights of the nodes, n numbers > 0, such as their numbers of examples: minimise the weighted mean
            Σ p_i f_i, where p_i is the node's share (`Topology.weighted`). By default all nodes count alike.
        resume: an earlier result of the same run to resume from, instead of x0.
        keep_history: False to keep only the last iterate, for long runs.
        engine: the engine to run on, by default a `Simulator` of the topology; x0 has the engine's number of rows.

    Raises:
        InputError: an argument is invalid; the message names it and the remedy.
        Diverged: a gradient or an iterate is not finite; `.result` holds the history so far.

    >>> import torch, quasiglobal as qg
    >>> target = torch.arange(8.0).reshape(8, 1)                  # node i wants x = i; together they want 3.5
    >>> result = qg.minimize(lambda x, t: x - target, torch.zeros(1), "dsgd-gt", "ring:8", lr=0.1, steps=400)
    >>> result.x.flatten().round(decimals=3).tolist()
    [3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5]
    """
    algorithm, topology = algorithms.algorithm(algorithm), parse(topology)
    if weights is not None:
        topology = topology.weighted(weights)
    if engine is None:
        compressed = checked_wire(wire, algorithm)
        engine = Simulator(
            topology, seeds=(seed,), rounded=wire == "bf16", wire=compressed, drop=drop, churn=churn
        )
    elif wire != "full" or drop or churn:
        raise InputError("with an engine of your own, wire, drop and churn are the engine's; leave them out")
    if engine.topology != topology:
        other = "another topology of the same name" if str(engine.topology) == str(topology) else str(topology)
        raise InputError(f"the engine is for {engine.topology}, but the topology is {other}; use one topology for both")
    if gradient is not None and not callable(gradient):
        raise InputError(f"gradient must be a function of (x, t), got {gradient!r}")
    check_needs(algorithm, topology, engine.faults if isinstance(engine, Simulator) else None)
    x = _start(x0, engine)
    rates = _learning_rates(lr, steps, algorithm, x)
    decay = _rate(weight_decay, "weight_decay", x)

    def gradient_at(x: Tensor, t: int) -> Tensor:
        return torch.zeros_like(x) if gradient is None else _as_gradient(gradient(x.clone(), t), x)

    def full_gradient_at(x: Tensor, t: int) -> Tensor:
        return gradient_at(x, t) if full_gradient is None else _as_gradient(full_gradient(x.clone()), x)

    result = Result(x, x[None], engine.begin(algorithm, x), 0)
    if resume is not None:
        _check_resume(resume, result)
        result = resume
    history = _room(result, steps) if keep_history else None
    for t in range(result.steps + 1, steps + 1):
        g = gradient_at(result.x, t)
        if not g.isfinite().all():
            raise Diverged("the gradient", t, *_first_bad(g, engine), result)
        x, state = engine.step(
            algorithm, result.x, g, result.state, t=t, lr=rates[t - 1], weight_decay=decay,
            full_gradient=partial(full_gradient_at, t=t), gradient=partial(gradient_at, t=t),
        )
        if not x.isfinite().all():
            raise Diverged("x", t, *_first_bad(x, engine), result)
        if history is not None:
            history[t] = x
        result = Result(x, x[None] if history is None else history[: t + 1], state, t)
    return result


def _start(x0: ArrayLike | Tensor, engine: Host) -> Tensor:
    """Check x0 and expand it to [rows, d]."""
    try:
        x = (x0 if isinstance(x0, Tensor) else torch.tensor(np.array(x0))).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"x0 must be an array of numbers, got {type(x0).__name__}") from None
    if isinstance(x0, list | tuple) or not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"x0 must be float32 or float64, got {x.dtype}; models are mixed in full precision")
    if x.ndim == 1:
        x = x.expand(engine.rows, -1)
    if x.ndim != 2 or len(x) != engine.rows or x.shape[1] == 0:
        raise InputError(
            f"x0 must have shape [{engine.rows}, d] or [d] for the {engine.rows} nodes of {engine.topology}, "
            f"got {list(x.shape)}"
        )
    if not x.isfinite().all():
        raise InputError(f"x0 is not finite at node {_first_bad(x, engine)[1]}; use finite numbers")
    return x.clone()


def _learning_rates(lr: LearningRate, steps: int, algorithm: Algorithm, x: Tensor) -> list[Tensor]:
    """The learning rates of all steps, checked before the first step."""
    if whole(steps) is None or steps < 0:
        raise InputError(f"steps must be a whole number >= 0, got {steps!r}; it is the total number of steps")
    if isinstance(lr, list | tuple):
        raise InputError("lr must be a number, a tensor or a function; for a list of rates: lambda t: rates[t - 1]")
    rates = [_rate(lr(t) if callable(lr) else lr, "lr", x, f" at step {t}") for t in range(1, steps + 1)]
    for t, rate in enumerate(rates, start=1):
        if needs_of(algorithm).divides_by_lr and (rate == 0).any():
            raise InputError(
                f"lr is 0 at step {t}, but {type(algorithm).__name__} divides by lr; end the schedule above 0"
            )
    return rates


def _rate(value: float | Tensor, what: str, x: Tensor, when: str = "") -> Tensor:
    """Check and copy a number >= 0, or a tensor of such numbers that broadcasts to x."""
    try:
        rate = torch.as_tensor(value, dtype=x.dtype, device=x.device).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{what} must be a number or a tensor, got {value!r}{when}") from None
    try:
        rate.expand_as(x)
    except RuntimeError:
        raise InputError(
            f"{what} must be a number or broadcast to x's {list(x.shape)}, got {list(rate.shape)}{when}"
        ) from None
    if not rate.isfinite().all() or (rate < 0).any():
        raise InputError(f"{what} must be finite and >= 0, got {value}{when}")
    return rate


def _room(result: Result, steps: int) -> Tensor:
    """Copy the history so far into a tensor with space for the remaining steps."""
    if len(result.history) != result.steps + 1:
        raise InputError("the run to resume kept no history; resume it with keep_history=False")
    return torch.cat([result.history, result.x.new_empty(max(steps - result.steps, 0), *result.x.shape)])


def _check_resume(resume: Result, fresh: Result) -> None:
    """Raise if an earlier result cannot belong to the same run."""
    if not isinstance(resume, Result):
        raise InputError(f"resume must be an earlier Result, got {type(resume).__name__}")
    if resume.x.shape != fresh.x.shape or resume.x.dtype != fresh.x.dtype or set(resume.state) != set(fresh.state):
        raise InputError("the run to resume is of another algorithm, size or type; pass a result of the same run")


def _as_gradient(g: object, x: Tensor) -> Tensor:
    """Check and copy the return value of the user's function, which may reuse its storage."""
    try:
        values = torch.as_tensor(g)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"gradient must return shape {list(x.shape)}, like x, got {type(g).__name__}") from None
    if values.shape != x.shape or values.is_complex():
        kind = "complex " if values.is_complex() else ""
        raise InputError(f"gradient must return shape {list(x.shape)}, like x, got {kind}{list(values.shape)}")
    return values.detach().to(x, copy=True)


def _first_bad(values: Tensor, engine: Host) -> tuple[int, int]:
    """The run and the node of the first row that is not finite."""
    run, place = divmod(int((~values.isfinite()).any(dim=1).nonzero()[0]), len(engine.nodes))
    return run, engine.nodes[place]
