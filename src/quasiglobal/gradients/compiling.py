"""Wrappers of torch.compile for fixed shapes."""

from __future__ import annotations

import atexit
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.gradients.recording import recorded

log = logging.getLogger("quasiglobal")


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Compile the function at its first call.

    Hide the compiler's warnings about TF32, which is off on purpose, its choice of softmax, and its own use of `.grad`.
    """
    program = torch.compile(function, dynamic=False, backend=backend)
    if backend == "inductor":
        _leave_workers_at_exit()

    def call(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"TensorFloat32|\s*Online softmax|The \.grad attribute")
            return program(*arguments)

    return call


def compiled_in_place(
    function: Callable[..., Sequence[Tensor]],
    outputs: Sequence[int],
    arguments: Sequence[Tensor],
    backend: str = "inductor",
) -> Callable[..., None]:
    """Compile a pure function of tensors to a program that overwrites the arguments at `outputs` with its results.

    The function is first traced to plain tensor operations, without computing them: the compiler handles these more
    reliably than the Python code around them, such as precision switches. A result that is itself an argument is copied
    outside of the program: Inductor removes its clone as redundant and would read the argument after it has changed.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds to import

    moved: dict[int, int] = {}

    def in_place(*values: Tensor) -> None:
        for at, result in zip(outputs, function(*values), strict=True):
            source = next((k for k, value in enumerate(values) if value is result), None)
            if source is None:
                values[at].copy_(result)
            else:
                moved[at] = source

    program = compiled(make_fx(in_place, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments), backend)

    def call(*values: Tensor) -> None:
        held = {at: values[source].clone() for at, source in moved.items() if at != source}
        program(*values)
        for at, value in held.items():
            values[at].copy_(value)

    return call


def traced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.GraphModule:
    """Trace the function to a list of tensor operations, which avoids vmap's overhead per operation.

    Views become `reshape`, since a compiler may choose other strides than those traced; unless something is written
    into their memory.
    """
    device = arguments[0].device
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):       # tracing runs dropout too
        program = recorded(function, arguments)
    aten = torch.ops.aten
    reshaping = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    written = _written(program.graph)
    for node in program.graph.nodes:
        if node.target in reshaping and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
        elif node.target in reshaping[:2] and _origin(node) not in written:
            node.target = aten.reshape.default
    program.graph.eliminate_dead_code()
    program.recompile()
    return program


class Programs:
    """Traced or compiled programs, one for each function and the shapes and dtypes of its arguments."""

    def __init__(self) -> None:
        self._programs: dict[object, Callable[..., Any]] = {}
        self._calls: Counter[object] = Counter()

    def get(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        build: Callable[[], Callable[..., Any]],
        calls: int = 0,
    ) -> Callable[..., Any] | None:
        """The program, built after this many calls; None before."""
        key = function.__name__, tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments))
        self._calls[key] += 1
        if key not in self._programs and self._calls[key] > calls:
            self._programs[key] = build()
        return self._programs.get(key)


class Fused:
    """A function of tensors, traced and compiled for each shape of its arguments; called as it is if that fails."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self._programs = function, Programs()
        self.compiles = True
        """False after a failure."""

    def __call__(self, *arguments: Any) -> Any:
        if self.compiles:
            try:
                program = self._programs.get(self.function, arguments, lambda: self._built(arguments))
                assert program is not None
                return program(*arguments)
            except Exception as error:                      # users' losses may do anything
                log.info(f"{self.function} is not compiled: {str(error)[:160]}")
                self.compiles = False
        return self.function(*arguments)

    def _built(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        with torch.no_grad():
            return compiled(traced(self.function, tree_map(Tensor.detach, arguments)))


@cache
def _leave_workers_at_exit() -> None:
    """End the process without a wait of about ten seconds for the compiler's workers, which then end by themselves."""
    from torch._inductor import async_compile  # registers the wait, which has to be registered before `leave`

    def leave() -> None:
        for pool in async_compile._pool_set:
            if process := getattr(pool, "process", None):
                process.returncode = 0                      # nothing to wait for

    atexit.register(leave)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose results operations write into, directly or through a view; views count as their origin."""
    return {_origin(node.args[0]) for node in graph.nodes if _writes(node)}


def _origin(node: Any) -> Any:
    """The node whose memory a view, or the result of an operation in place, is."""
    while _writes(node) or getattr(node.target, "is_view", False) or node.target is torch.ops.aten.reshape.default:
        node = node.args[0]
    return node


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _shape(node: Any) -> object:
    """The shape of a traced node's result; the node itself if the result is not a tensor."""
    return getattr(node.meta.get("val"), "shape", node)
