"""One Triton kernel for the whole step of an algorithm: weight decay, update and gossip in one pass over memory.

The step is traced once for each kind of step, and translated (`step_source.py`). A program of the kernel has a block of
columns of all nodes of one run, so that gossip needs no other program: each tensor is read once and written once, in
place. A step with a norm of each row, as of qg-dadam, has a kernel before it that reads each tensor once more.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Edges, State
from quasiglobal.engines.host import Host
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.step_operations import EXCHANGE, LINKED, MEAN, MIX
from quasiglobal.engines.step_source import StepSource, write
from quasiglobal.stacked.recording import Untraceable, recorded

log = logging.getLogger("quasiglobal")

WARPS = 2
"""Warps per program; each of their threads has a few columns of all nodes."""

PER_THREAD = 128
"""Numbers that a thread holds of all arguments, in whole columns; at least one column. More would spill registers."""

MOST_BYTES = 128
"""Bytes of a column of all nodes above which a thread's registers do not suffice: 32 nodes in float32."""

MOST_NUMBERS = 192
"""Numbers of a column in all arguments above which a step with messages per edge does not fit a thread's registers."""

MOST_MESSAGES = 512
"""Messages of a gossip above which the kernel, with a line for each, takes long to compile."""


def step_kernel(
    algorithm: Algorithm, engine: Host, weight_decay: float | Tensor, t: int,
    x: Tensor, g: Tensor, time: Tensor, lr: Tensor, state: State,
) -> Callable[..., None] | None:
    """Return the kernel for steps of the kind of t: a function of (x, g, time, lr, *state) that steps in place.

    None if the step cannot be translated, for example since it needs further gradients.
    """
    if not available(x) or type(engine) is not Simulator or not _fits(engine, x):
        return None
    arguments = (x, g, time, lr, *state.values())
    outputs = [0, *range(4, len(arguments))]
    if not all(arguments[at].is_contiguous() for at in outputs):
        return None
    names = ["x", "g", "time", "lr", *state]
    try:
        program = _traced(algorithm, engine, weight_decay, t, list(state), arguments)
        sources = write(program, names, outputs, x, _shared(engine, x), _senders(engine), lambda: engine.links)
        if any(one.tiles > max(len(one.arguments), MOST_NUMBERS // engine.topology.n) for one in sources):
            raise Untraceable("the messages of all edges are too many for a thread")
    except Exception as error:                              # an algorithm may do anything; its plain step still works
        log.debug(f"no kernel for a step of {algorithm}: {error!r}")
        return None
    try:
        kernel = StepKernel(sources, engine, t, x)
        kernel.compile(*arguments)
    except Exception as error:
        log.warning(f"Triton cannot compile the step of {algorithm}; it runs without, slower: {str(error)[:160]}")
        return None
    return kernel


def available(x: Tensor) -> bool:
    """Whether Triton can run on the device of x."""
    return x.is_cuda and find_spec("triton") is not None


class StepKernel:
    """A translated step: the kernels of its sums over columns and of values without columns, and the step's."""

    def __init__(self, sources: Sequence[StepSource], engine: Simulator, t: int, x: Tensor) -> None:
        self.passes = [Pass(source, engine, t, x) for source in sources]
        self.any_rows = all(one.any_rows for one in self.passes)
        """Whether the kernels can also run with another number of runs."""

    def __call__(self, *arguments: Tensor) -> None:
        for old, new in self._run(arguments):
            old.copy_(new)

    def compile(self, *arguments: Tensor) -> None:
        """Compile without a launch."""
        self._run(arguments, compiles=True)

    def _run(self, arguments: Sequence[Tensor], compiles: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Run all kernels; return the arguments without columns, and their new values."""
        sums: list[Tensor] = []
        changes: list[tuple[Tensor, Tensor]] = []
        for one in self.passes:
            made = one.run(arguments, sums, compiles)
            if one.source.narrow:
                changes += zip((arguments[at] for at in one.source.narrow), made, strict=True)
            else:
                sums += made
        return changes


class Pass:
    """The launch of one kernel, with the weights of step t of the engine."""

    def __init__(self, source: StepSource, engine: Simulator, t: int, x: Tensor) -> None:
        self.source, n, d = source, engine.topology.n, x.shape[1]
        padded, size = 1 << (n - 1).bit_length(), x.element_size()
        columns = PER_THREAD // (padded * source.tiles)
        columns = max(1, min(1 << max(0, columns.bit_length() - 1), 16 // size))    # at most 16 bytes in one load
        block = 1 if source.narrow else 32 * WARPS * columns
        self.constants = [value.to(x.device) for value in source.constants]
        self.weights = source.mixes * [_weights(engine, t, x)]
        self.sizes = (n, padded, d, _shared(engine, x), block, min(block, columns))
        self.blocks = 1 if source.narrow else -(-d // block)
        here = bool(source.constants) or engine.topology.is_drawn(t)
        self.any_rows = len(x) > 1 and not here and source.finish is None
        """Whether the kernel can also run with another number of runs, and another engine.

        In one row, a scalar looks like a column. Drawn weights are in the storage of this engine.
        """
        self.function = _jitted(source.text)

    def run(self, arguments: Sequence[Tensor], sums: Sequence[Tensor], compiles: bool = False) -> list[Tensor]:
        """Launch, or only compile; return the sums over the columns [rows, 1], or the values without columns.

        Products and sums are rounded one by one: nodes that agree stay equal, bit for bit.
        """
        values = [arguments[at].contiguous() for at in self.source.arguments]
        finish, rows = self.source.finish, len(arguments[0])
        grid = self.blocks, rows // self.sizes[0]
        made = [arguments[0].new_empty(self.blocks, rows)] if finish else []
        made += [torch.empty_like(arguments[at]) for at in self.source.narrow]
        values += [*self.constants, *(sums[k] for k in self.source.sums), *made, *self.weights]
        launch = functools.partial(self.function.warmup, grid=grid) if compiles else self.function[grid]
        with torch.cuda.device_of(values[0]):  # type: ignore[no-untyped-call]
            launch(*values, *self.sizes, num_warps=WARPS, enable_fp_fusion=False)
        return [finish(made[0].sum(dim=0))[:, None]] if finish else made


class TracedEngine(Host):
    """Engine for a trace: its mixing and means are one operation each."""

    def __init__(self, engine: Host, mixes: bool) -> None:
        super().__init__(engine.topology, nodes=engine.nodes, seeds=engine.seeds, shared=engine.shared)
        self.mixes = mixes

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(MIX(v) for v in tensors) if self.mixes else tensors

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        if among is not None or self.topology.shares is not None:
            raise Untraceable("the mean over some nodes, or with weights, has no translation")
        mean: Tensor = MEAN(tensor)
        return mean

    def averaged(self, rows: Tensor) -> Tensor:
        raise Untraceable("a mean without faults has no translation")

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        raise Untraceable("a push has no translation")

    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        raise Untraceable("a compressed message has no translation")

    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        step = self.topology.position(t if at is None else at) + 1
        return tuple(EXCHANGE(v, step) for v in messages), self._linked(max(messages, key=lambda v: v.shape[2]), step)

    def edges(self, x: Tensor) -> Edges:
        if self.topology.period is None:
            return super().edges(x)
        return Edges(self.topology.n, self.links.degree, self.topology.period, self._linked(x, 0), self._linked(x, -1))

    def _linked(self, like: Tensor, t: int) -> Tensor:
        width = like.shape[-1]
        mask: Tensor = LINKED(like, self.links.degree, 1 if self.columns(width) == width else width, t)
        return mask

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        raise Untraceable("random nodes have no translation")

    def coin(self, p: float, time: Tensor) -> Tensor:
        raise Untraceable("random numbers have no translation")


def _traced(
    algorithm: Algorithm, engine: Simulator, weight_decay: float | Tensor, t: int, names: list[str],
    arguments: tuple[Tensor, ...],
) -> Any:
    """The step as a graph of ATen operations, traced with tensors that hold no numbers."""
    graph = engine.topology
    mixes = graph.is_drawn(t) or bool((graph.weights(t) != np.eye(graph.n)).any())
    traced = TracedEngine(engine, mixes)
    step = step_of_tensors(traced, algorithm, weight_decay, t, names)
    return recorded(step, arguments, values=False)


def step_of_tensors(
    engine: Host, algorithm: Algorithm, weight_decay: float | Tensor, t: int, names: list[str]
) -> Callable[..., list[Tensor]]:
    """Return the step as a function of (x, g, time, lr, *state), which returns the new x and the new state.

    It raises `Untraceable` if the algorithm needs further gradients.
    """
    def step(x: Tensor, g: Tensor, time: Tensor, lr: Tensor, *values: Tensor) -> list[Tensor]:
        state = dict(zip(names, values, strict=True))
        new, state = engine.step(
            algorithm, x, g, state, t=t, time=time, lr=lr, full_gradient=_no_further_gradients,
            gradient=_no_further_gradients, weight_decay=weight_decay,
        )
        return [new, *(state[name] for name in names)]

    return step


def _no_further_gradients(x: Tensor) -> Tensor:
    raise Untraceable("the step needs further gradients")


def _fits(engine: Simulator, x: Tensor) -> bool:
    """Whether a thread can hold all nodes of a column, and nothing changes the messages on their way."""
    plain = x.dtype in (torch.float32, torch.float64) and not engine.faults and not engine.rounded
    small = engine.topology.n * x.element_size() <= MOST_BYTES
    return plain and small and sum(map(len, _senders(engine))) <= MOST_MESSAGES


def _shared(engine: Simulator, x: Tensor) -> int:
    return x.shape[1] if engine.shared is None else engine.shared


def _senders(engine: Simulator) -> list[list[int]]:
    """The nodes that each node receives from at any step: one source for all positions of a topology."""
    return [np.flatnonzero(row).tolist() for row in engine.topology.links()]


def _weights(engine: Simulator, t: int, x: Tensor) -> Tensor:
    """The weights that the kernel reads, off the diagonal: W, or W − I in the storage of drawn weights."""
    if engine.topology.is_drawn(t):
        return engine.drawn(t, x)
    return torch.from_numpy(engine.topology.weights(t)).to(x.device, x.dtype)


@functools.cache
def _jitted(text: str) -> Any:
    """The kernel of a source text, which Triton reads through `linecache`, as a debugger does."""
    import triton
    import triton.language as tl

    from quasiglobal.stacked.kernels import tile

    name = f"<step {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"__name__": __name__, "triton": triton, "tl": tl, "tile": tile}
    exec(compile(text, name, "exec"), space)
    return space["step"]
