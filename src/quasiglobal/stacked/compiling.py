"""Wrappers of torch.compile for fixed shapes."""

from __future__ import annotations

import atexit
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.trees import Tree
from quasiglobal.stacked.recording import recorded, written
from quasiglobal.stacked.step import RecordedStep

log = logging.getLogger("quasiglobal")

aten = torch.ops.aten

Computation = Callable[..., Tree]
"""A function of trees of tensors."""

SAFE: dict[str, str | int | bool | Callable[..., object]] = {
    "emulate_precision_casts": True, "comprehensive_padding": False, "loop_ordering_after_fusion": False
}
"""Options of Inductor against silent errors.

Without casts a fused value in 16 bits is more precise than its stored copy, so that the gradient of a maximum does not
find it. With padding, a reduction may read a padded tensor by its unpadded strides (pytorch/pytorch#179931).
With loops ordered after fusion the gradient of an Inception's stem has an error of 22 % in float32, on a GPU.
"""


def by_inductor(function: Computation, backend: str = "inductor") -> Computation:
    """Compile the function at its first call.

    Hide the compiler's warnings about its own use of deprecated parts of PyTorch and of `.grad`, about TF32, which is
    off on purpose, and about its choice of softmax.
    """
    options = SAFE if backend == "inductor" else None
    with _quiet():
        program = torch.compile(function, dynamic=False, backend=backend, options=options)
        if backend == "inductor":
            _leave_workers_at_exit()

    def call(*arguments: Tree) -> Tree:
        with _quiet():
            return program(*arguments)

    return call


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        warnings.filterwarnings("ignore", message=r"TensorFloat32|\s*Online softmax|The \.grad attribute")
        yield


def step_by_inductor(step: RecordedStep, backend: str = "inductor") -> Callable[..., None]:
    """Compile a recorded step to a program that overwrites its arguments with their new values.

    A new value that is another argument is copied outside of the program: Inductor removes its clone as redundant and
    would read the argument after it has changed.
    """
    _reshape(step.program.graph)
    step.program.recompile()
    moved = {at: step.arguments.index(value) for at, value in step.changed.items() if value in step.arguments}

    def in_place(*values: Tensor) -> None:
        for at, result in zip(step.outputs, step.program(*values), strict=True):
            if at in step.changed and at not in moved:
                values[at].copy_(result)

    program = by_inductor(in_place, backend)

    def call(*values: Tensor) -> None:
        held = {at: values[source].clone() for at, source in moved.items()}
        program(*values)
        for at, value in held.items():
            values[at].copy_(value)

    return call


def traced(function: Computation, arguments: tuple[Tree, ...]) -> fx.GraphModule:
    """Trace the function to a list of tensor operations, which avoids vmap's overhead per operation.

    Views become `reshape`, since a compiler may choose other strides than those traced. Nothing is written into their
    memory: operations in place are replaced.
    """
    device = arguments[0].device
    arguments = arguments[0], *tree_map(torch.clone, arguments[1:])             # a model may write into its inputs
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):       # tracing runs dropout too
        program = recorded(function, arguments)
        schemas = [getattr(node.target, "_schema", None) for node in program.graph.nodes]
        if any(schema is not None and schema.is_mutable for schema in schemas):
            program = recorded(torch.func.functionalize(program, remove="mutations_and_views"), arguments)
    names = {
        node: str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.") for node in program.graph.nodes
    }
    strided = any(name.startswith("as_strided") for name in names.values())
    for node, name in names.items():                        # permute_copy and others: nothing writes any more
        if name == "copy" and not strided:                  # otherwise its result has to have the strides of x
            node.target = written
        elif name.endswith("_copy") and hasattr(aten, name[:-5]):
            node.target = getattr(getattr(aten, name[:-5]), node.target._overloadname)
    _reshape(program.graph)
    program.graph.eliminate_dead_code()
    program.recompile()
    return program


def _reshape(graph: fx.Graph) -> None:
    """Replace views, whose operand may get other strides than when it was recorded."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default):
            if node.meta["val"].shape == node.args[0].meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
            elif node.target is not aten.expand.default:
                node.target = aten.reshape.default


class Programs:
    """Traced or compiled programs, one for each function and the shapes and dtypes of its arguments."""

    def __init__(self) -> None:
        self._programs: dict[object, Computation] = {}
        self._calls: Counter[object] = Counter()

    def __call__(
        self, function: Computation, arguments: tuple[Tree, ...],
        build: Callable[[Computation, tuple[Tree, ...]], Computation], calls: int = 0,
    ) -> Tree:
        """Call the program, which is built after this many calls; the function before."""
        key = function.__name__, tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments))
        self._calls[key] += 1
        if key not in self._programs and self._calls[key] > calls:
            self._programs[key] = build(function, arguments)
        return self._programs.get(key, function)(*arguments)


class Fused:
    """A function of tensors, traced and compiled for each shape of its arguments; called as it is if that fails."""

    def __init__(self, function: Computation) -> None:
        self.function, self._programs = function, Programs()
        self.compiles = True
        """False after a failure."""

    def __call__(self, *arguments: Tree) -> Tree:
        if self.compiles:
            try:
                return self._programs(self.function, arguments, _fused)
            except Exception as error:                      # users' losses may do anything
                log.info(f"{self.function} is not compiled: {str(error)[:160]}")
                self.compiles = False
        return self.function(*arguments)


def _fused(function: Computation, arguments: tuple[Tree, ...]) -> Computation:
    with torch.no_grad():
        return by_inductor(traced(function, tree_map(Tensor.detach, arguments)))


@cache
def _leave_workers_at_exit() -> None:
    """End the process without a wait of about ten seconds for the compiler's workers, which then end by themselves."""
    from torch._inductor import async_compile  # registers the wait, which has to be registered before `leave`

    def leave() -> None:
        for pool in async_compile._pool_set:
            if process := getattr(pool, "process", None):
                process.returncode = 0                      # nothing to wait for

    atexit.register(leave)
