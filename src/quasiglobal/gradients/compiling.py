"""torch.compile and make_fx, as they are used here: for one shape of everything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Untraceable(Exception):
    """Raised by a function that cannot be traced."""


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """The function, compiled at its first call.

    Hides the compiler's hints on TF32, which is off on purpose, and on the softmax that it chose.
    """
    program = torch.compile(function, dynamic=False, backend=backend)

    def call(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"TensorFloat32|\s*Online softmax")
            return program(*arguments)

    return call


def compiled_in_place(
    function: Callable[..., Sequence[Tensor]],
    outputs: Sequence[int],
    arguments: Sequence[Tensor],
    backend: str = "inductor",
) -> Callable[..., None]:
    """A pure function of tensors as a program that overwrites the arguments at `outputs` with its results.

    The function is traced to plain tensor operations first: the compiler handles those more reliably than Python
    around them, such as switches of precision. A result that is itself an argument is copied outside of the program:
    Inductor drops its clone as superfluous and would read it after it was overwritten.
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

    program = compiled(make_fx(in_place)(*(value.clone() for value in arguments)), backend)

    def call(*values: Tensor) -> None:
        held = {at: values[source].clone() for at, source in moved.items() if at != source}
        program(*values)
        for at, value in held.items():
            values[at].copy_(value)

    return call


def traced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The function as a list of tensor operations, without vmap's overhead at each of them."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds to import

    device = arguments[0].device
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):       # tracing draws for dropout too
        program = make_fx(lambda *values: function(*values))(*arguments)
    aten = torch.ops.aten
    reshaping = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    for node in program.graph.nodes:
        if node.target in reshaping and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    program.graph.eliminate_dead_code()
    program.recompile()
    result: Callable[..., Any] = program
    return result


def program_key(function: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    """Equal for calls that one program serves: the same function on arguments of the same shapes and types."""
    return function.__name__, tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments))


def _shape(node: Any) -> object:
    """The shape of a traced node's result; the node itself where that is no tensor."""
    return getattr(node.meta.get("tensor_meta") or node.meta.get("val"), "shape", node)
