"""Record the tensor operations of a function as a graph.

PyTorch's own `make_fx` does the same, but imports its compiler, which takes seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from quasiglobal.common.trees import Tree

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten


class Untraceable(Exception):
    """Raised by a function that cannot be traced."""


def recorded(function: Callable[..., Tree], arguments: Sequence[Tree], values: bool = True) -> fx.GraphModule:
    """Run a function of trees of tensors, and return its ATen operations as a function of the same arguments.

    Each node's `meta["val"]` is a tensor like its result on the device `meta`. With `values` false the function runs on
    tensors whose elements are one number, which take no memory; it may not write into them.
    """
    leaves, structure = tree_flatten((tuple(arguments), {}))
    recorder = _Recorder(values)
    given = [recorder.argument(leaf) for leaf in leaves]
    with recorder:
        results, after = tree_flatten(function(*structure.unflatten(given)[0]))
    recorder.graph.output(recorder.nodes_of(results))
    names = [f"argument_{k}" for k in range(len(arguments))]
    recorder.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, structure, after)))
    recorder.graph.eliminate_dead_code()
    return fx.GraphModule(recorder.root, recorder.graph)


def is_recording() -> bool:
    """Whether operations are recorded now."""
    return any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack())


def operation(schema: str, function: Callable[..., Tree]) -> OpOverload:
    """Define an operation of graphs, computed by `function`; `torch.library.custom_op` would import the compiler."""
    name = schema.partition("(")[0]
    OPERATIONS.define(schema)  # type: ignore[no-untyped-call]
    OPERATIONS.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    overload: OpOverload = getattr(torch.ops.quasiglobal, name).default
    return overload


def written(x: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    """The result of `x.copy_(values)` or `x.fill_(values)`: `aten.copy` has no derivative, vmap no rule for `fill`."""
    return values.to(x.dtype).expand(x.shape)


OPERATIONS = torch.library.Library("quasiglobal", "DEF")  # type: ignore[no-untyped-call]
"""Holds the definitions as long as the process runs."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add a node to a graph for each operation below autograd, vmap and autocast."""

    def __init__(self, values: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root, self.values = fx.Graph(), nn.Module(), values
        self.nodes = WeakTensorKeyDictionary()
        """The node whose result a tensor is."""
        self.known: set[fx.Node] = set()
        """Nodes whose results depend on no argument and no random number."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: PyTorch would import its compiler to switch it off."""
        return False

    def argument(self, leaf: object) -> object:
        """A tensor to call the function with, for a leaf of its arguments."""
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}")
        if isinstance(leaf, Tensor):
            own = leaf.detach() if self.values else _hollow(leaf)               # each argument is a tensor of its own
            self._is_result(own, node)
            return own
        return leaf

    def nodes_of(self, tree: Tree) -> Tree:
        """The nodes of the tensors in a tree of operands or results."""
        return tree_map_only(Tensor, self._node, tree)

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: tuple[Tree, ...] = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        operands = self.nodes_of((args, kwargs))
        known = all(one in self.known for one in tree_leaves(operands) if isinstance(one, fx.Node))
        if torch.Tag.data_dependent_output in function.tags:
            if known and self.values:
                return function(*args, **kwargs)
            raise Untraceable(f"{function} reads a value that is not known in advance")
        if function is aten.lift_fresh.default:             # the constant itself must not be changed in place
            function = aten.lift_fresh_copy.default
        node = self.graph.call_function(function, *operands)
        result = function(*args, **kwargs)
        if not self.values:
            result = tree_map_only(Tensor, _hollow, result)
        if known and torch.Tag.nondeterministic_seeded not in function.tags:
            self.known.add(node)
        self._are_results(result, node)
        return result

    def _node(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor; one that no operation returned is a constant."""
        if tensor not in self.nodes:
            name = f"_tensor_constant{len(list(self.root.buffers()))}"
            self.root.register_buffer(name, tensor)
            node = self.graph.get_attr(name)
            self.known.add(node)
            self._is_result(tensor, node)
        found: fx.Node = self.nodes[tensor]
        return found

    def _are_results(self, result: Tree, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            self._is_result(result, node)
        elif isinstance(result, (tuple, list)):
            node.meta["val"] = tree_map_only(Tensor, _without_values, result)
            for k, one in enumerate(result):
                if isinstance(one, Tensor):
                    part = self.graph.call_function(operator.getitem, (node, k))
                    if node in self.known:
                        self.known.add(part)
                    self._is_result(one, part)

    def _is_result(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["val"] = _without_values(tensor)
        self.nodes[tensor] = node


def _hollow(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype whose elements are one number."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _without_values(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype on the device `meta`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
