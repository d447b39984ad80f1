"""Functions of a tile [columns, nodes] for generated kernels: the values of all nodes of a run in a block of columns.

In the layout that Triton chooses for such a tile a thread holds whole columns, so that sums over the nodes and the
extraction of a node stay in its registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_node(v, node, i):
    """One node's values [columns, 1]; the compiler leaves out the sum of zeros."""
    return tl.sum(tl.where(node == i, v, 0.0), axis=1, keep_dims=True)


@triton.jit
def among(nodes: tl.constexpr, node):
    """Whether each node is one of those whose bits are set in `nodes`."""
    return ((tl.full([1, 1], nodes, tl.int64) >> node.to(tl.int64)) & 1) != 0


@triton.jit
def mean(v, node, NODES: tl.constexpr):
    """The mean over the nodes, in every node's place."""
    total = tl.sum(tl.where(node < NODES, v, 0.0), axis=1, keep_dims=True)
    return tl.broadcast_to(divide(total, number(NODES, v)), v.shape)


@triton.jit
def number(value: tl.constexpr, like):
    """A number in the precision of a tensor; a comparison would round it to float32."""
    return tl.full([1, 1], value, like.dtype)


@triton.jit
def divide(a, b):
    """a / b, correctly rounded."""
    return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def root(a):
    """The square root, correctly rounded."""
    return tl.sqrt_rn(a) if a.dtype == tl.float32 else tl.sqrt(a)


@triton.jit
def power(log_base: tl.constexpr, exponent):
    """A number > 0, given by its logarithm, to the power `exponent`; in float64, since float32's exp is inexact."""
    return tl.exp(exponent.to(tl.float64) * log_base).to(exponent.dtype)


@triton.jit
def sign(a):
    """−1, 0 or 1; 0 for NaN, as in PyTorch."""
    return tl.where(a > 0, 1.0, 0.0).to(a.dtype) - tl.where(a < 0, 1.0, 0.0).to(a.dtype)


@triton.jit
def at_least(a, low: tl.constexpr):
    """The larger of a and a number; NaN stays NaN."""
    return tl.where(a < number(low, a), number(low, a), a)


@triton.jit
def at_most(a, high: tl.constexpr):
    """The smaller of a and a number; NaN stays NaN."""
    return tl.where(a > number(high, a), number(high, a), a)
