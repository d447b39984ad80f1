"""Selection of the traced operations that the kernels compute, and fusion."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from quasiglobal.stacked.kernels.geometry import Geometry, geometry_of
from quasiglobal.stacked.kernels.operations import LAYER_NORM, LINEAR, NORMALISE, convolve

aten = torch.ops.aten

COUNT = aten._foreach_add.Scalar
"""Addition of a number to each tensor of a list, which is the same for one model and for all."""


def convolves(node: Any) -> bool:
    """Whether the kernels compute this convolution or linear layer, in a graph after `fuse`."""
    return node.target is convolve


def is_linear(node: Any) -> bool:
    """Whether this is a linear layer of the kernels: a convolution of single pixels."""
    return convolves(node) and len(shape_of(node.args[1])) == 2


def pixels(node: Any, of: Any) -> int:
    """Number of pixels of the images `of`, which a convolution or a linear layer reads or returns."""
    shape = shape_of(of)
    return prod(shape) // shape[-1 if is_linear(node) else 1]


def geometry(node: Any) -> Geometry:
    """The geometry of a convolution."""
    return geometry_of(shape_of(node.args[1]), *node.args[4:-1])


def pools(node: Any) -> bool:
    """Whether the kernels compute this maximum pooling: squares that tile the images, indices unused."""
    if node.target is not aten.max_pool2d_with_indices.default or len(node.args) > 3:
        return False
    x, window, *stride = node.args
    sizes = shape_of(x)[-2:]
    squares = not any(stride) or set(window) == set(*stride)
    squares = squares and len(set(window)) == 1 and not any(size % window[0] for size in sizes)
    return squares and len(shape_of(x)) == 4 and all(user.args[1] == 0 for user in node.users)


def masks(node: Any) -> bool:
    """Whether this pooling computes the gradient before the ReLU of a convolution, whose result only it reads.

    The ReLU's gradient is 0 where the pooled value is 0, which is a tensor of a quarter of the size.
    """
    x = node.args[0]
    return convolves(x) and "kernel" in x.meta and x.args[-1] is True and len(x.users) == 1


def normalises(node: Any) -> bool:
    """Whether the kernels compute this normalisation: group size 1, or group size and channels are powers of two."""
    if node.target is not NORMALISE or not all(map(_is_own, node.args[1:3])):
        return False
    x, _, _, _, _, kind, groups, *_ = node.args
    channels = shape_of(x)[1]
    size = 1 if kind == "batch" else channels // groups
    return size == 1 or (size & (size - 1) == 0 and channels & (channels - 1) == 0)


def normalises_pixels(node: Any) -> bool:
    """Whether the kernels compute this normalisation over the last dimension."""
    own = node.target is LAYER_NORM and all(map(_is_own, node.args[1:3]))
    return own and shape_of(node.args[1])[0] <= MOST_CHANNELS


MOST_CHANNELS = 4096
"""Channels above which a pixel does not fit the registers of a block."""


def only_for_kernels(node: Any) -> bool:
    """Whether the result of this normalisation has the precision of matrix products.

    This holds if only convolutions and sums of the kernels read it, and for batch normalisation. Otherwise the result
    has the precision of the parameters, as under autocast.
    """
    y = _result(node)
    if node.target is NORMALISE and node.args[5] == "batch":
        return True
    return all("kernel" in user.meta and (convolves(user) or user.args[0] is not y) for y, user in _readers(y))


def _readers(y: Any) -> list[tuple[Any, Any]]:
    """The operations that read y or a permutation of it, each after what it reads."""
    users = [(y, user) for user in y.users if user.target is not aten.permute.default]
    return users + [pair for user in y.users if user.target is aten.permute.default for pair in _readers(user)]


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a traced node's result."""
    return tuple(node.meta["val"].shape)


def fuse(graph: fx.Graph) -> None:
    """Fuse a sum and a ReLU into the convolution or the normalisation before them."""
    for node in graph.nodes:
        if node.target is aten.convolution.default and _suits(node):
            node.target = convolve
            node.args = (*node.args[:3], None, *node.args[3:], False)
        elif node.target is LINEAR and all(_is_own(one) for one in node.args[1:] if one is not None):
            node.target = convolve
            node.args = (*node.args, None, [], [], [], False, [], 1, False)
    hidden = any("batch_norm" in str(node.target) for node in graph.nodes)      # writes into its arguments
    for node in list(graph.nodes):
        if node.target in (convolve, NORMALISE):
            _absorb(node)
        elif node.target is aten.copy.default and _alike(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.clone.default and node.args[0].op == "placeholder" and not hidden:
            node.replace_all_uses_with(node.args[0])
    _count_together(graph)
    graph.eliminate_dead_code()


def _count_together(graph: fx.Graph) -> None:
    """Merge the increments of counters, such as the batches that BatchNorm layers have seen, into one operation."""
    counts = [node for node in graph.nodes if _counts(node)]
    if counts:
        with graph.inserting_before(counts[0]):
            together = graph.call_function(COUNT, ([node.args[0] for node in counts], 1))
            for k, node in enumerate(counts):
                one = graph.call_function(operator.getitem, (together, k))
                one.meta = node.meta
                node.replace_all_uses_with(one)


def _counts(node: Any) -> bool:
    """Whether an operation adds 1 to an integer that is an argument of the program."""
    if node.target is not aten.add.Tensor or node.args[1:] != (1,) or node.kwargs:
        return False
    number = node.meta["val"]
    return node.args[0].op == "placeholder" and number.ndim == 0 and not number.is_floating_point()


def _absorb(node: Any) -> None:
    """Fuse the only user of the result: a sum with an earlier tensor of the same shape, then a ReLU."""
    y = _result(node)
    x, weight, bias, rest, *how, relu = node.args
    if (add := _only_user(y, aten.add.Tensor)) and not add.kwargs:
        other = add.args[1] if add.args[0] is y else add.args[0]
        if isinstance(other, fx.Node) and other < node and shape_of(other) == shape_of(y):
            rest = other
            add.replace_all_uses_with(y)
            add.args = ()
    if activation := _only_user(y, aten.relu.default):
        relu = True
        activation.replace_all_uses_with(y)
        activation.args = ()
    node.args = (x, weight, bias, rest, *how, relu)


def _suits(node: Any) -> bool:
    """Whether a convolution is 1-D or 2-D, and nothing else uses its parameters."""
    x, weight, bias, *_ = node.args
    own = _is_own(weight) and (bias is None or _is_own(bias))
    return own and len(shape_of(weight)) in (3, 4) and len(shape_of(x)) == len(shape_of(weight))


def _result(node: Any) -> Any:
    """The images that a convolution or a normalisation returns; a normalisation also returns running statistics."""
    return node if node.target is not NORMALISE else next(user for user in node.users if user.args[1] == 0)


def _alike(one: Any, other: Any) -> bool:
    """Whether the results of two nodes have the same shape and type."""
    return shape_of(one) == shape_of(other) and one.meta["val"].dtype == other.meta["val"].dtype


def _is_own(parameter: Any) -> bool:
    """Whether this is a parameter used by only one operation."""
    return "parameter" in parameter.meta and len(parameter.users) == 1


def _only_user(node: fx.Node, target: object) -> Any:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None
