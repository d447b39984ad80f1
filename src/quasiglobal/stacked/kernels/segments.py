"""Runs of operations between the kernels, each compiled to few fused kernels.

A network such as ConvNeXt has many pointwise operations that our kernels do not compute: LayerNorm over channels, GELU,
layer scale. Alone, each would be a pass over the images of all models.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from quasiglobal.stacked.compiling import compiled, traced

WORTH_COMPILING = 2
"""Operations on images, besides views, from which a segment is compiled: compiling takes seconds."""

MOST_OPERATIONS = 400
"""Operations above which a segment is not compiled, as of a long recurrence: that would take minutes."""


class Segment:
    """Consecutive operations of a program without kernels, as a function of the values that they read."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        own = set(nodes)
        self.nodes = list(nodes)
        self.inputs = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in own))
        self.results = [node for node in nodes if any(user not in own for user in node.users)]

    @property
    def is_worth_compiling(self) -> bool:
        """Whether there are several operations on images that compute something, and not too many to compile."""
        return len(self.nodes) <= MOST_OPERATIONS and sum(map(_computes_images, self.nodes)) >= WORTH_COMPILING

    @cached_property
    def key(self) -> str:
        """Text that is equal for segments with the same operations on values of the same shapes and dtypes."""
        number = {node: str(k) for k, node in enumerate([*self.inputs, *self.nodes])}

        def text(node: fx.Node) -> str:
            args, named = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
            return f"{node.target}{args}{named}"

        shapes = [f"{tuple(one.meta['val'].shape)}" for one in self.inputs if isinstance(one.meta.get("val"), Tensor)]
        return "\n".join([*shapes, *map(text, self.nodes), *(number[one] for one in self.results)])


def segments(graph: fx.Graph, is_kernel: Callable[[fx.Node], bool]) -> list[Segment]:
    """The maximal runs of calls between the kernels of a graph."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op != "call_function" or is_kernel(node) or any(map(is_kernel, _selected(node))):
            runs.append([])
        else:
            runs[-1].append(node)
    return [Segment(run) for run in runs if run]


class CompiledSegments:
    """The compiled functions of segments; equal segments share one."""

    def __init__(self) -> None:
        self._programs: dict[object, Callable[..., Any]] = {}
        self.postponed: list[tuple[Segment, Sequence[Any]]] | None = None
        """Calls in a rehearsal (`rehearsal.py`), which are not compiled yet; None in any other run."""

    def __call__(
        self, segment: Segment, function: Callable[..., Any], values: Sequence[Any]
    ) -> Any:
        """Call `function`, which computes the segment's results from `values`, compiled at the first call."""
        if self.postponed is not None:
            self.postponed.append((segment, values))
            return function(*values)
        like = tuple((value.dtype, value.stride(), value.requires_grad) for value in values)
        key = segment.key, like
        if key not in self._programs:
            with torch.no_grad():                           # copies: tracing runs the operations, some of them in place
                self._programs[key] = compiled(traced(function, tuple(map(_copied, values))))
        return self._programs[key](*values)


def _copied(value: Tensor) -> Tensor:
    """A copy with the same strides, on which the traced views depend."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _selected(node: fx.Node) -> Sequence[fx.Node]:
    """The operation whose result this node selects, if any."""
    return node.all_input_nodes if node.target is operator.getitem else ()


def _computes_images(node: Any) -> bool:
    """Whether an operation computes from images, or to images; views and selections do not."""
    if node.target is operator.getitem or getattr(node.target, "is_view", False):
        return False
    values = (one.meta.get("val") for one in (node, *node.all_input_nodes))
    return any(isinstance(value, Tensor) and value.ndim >= 3 for value in values)
