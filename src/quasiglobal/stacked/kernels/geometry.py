"""Geometry of a convolution: kernel size, strides, paddings, dilation and groups, as (rows, columns)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""A number for the rows and one for the columns."""


@dataclass(frozen=True)
class Geometry:
    """A 2-D convolution, or the transpose of one: then its input is the convolution's output, and vice versa."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    depthwise: bool = False
    """Whether each group has one input channel (transposed: one output channel)."""
    transposed: bool = False
    extra: Pair = (0, 0)
    """Rows and columns that a transposed convolution adds at the end (`output_padding`)."""

    @property
    def order(self) -> tuple[int, ...]:
        """Permutation of a weight [out, in, r, s] to the kernels' order: [out, r, s, in], or depthwise [in, r, s, out].

        A transposed convolution has weights [in, out, r, s]: out and in of the convolution that it transposes.
        """
        return (1, 2, 3, 0) if self.depthwise else (0, 2, 3, 1)

    @property
    def reach(self) -> Pair:
        """Distance between the first and the last tap."""
        return self.dilation[0] * (self.kernel[0] - 1), self.dilation[1] * (self.kernel[1] - 1)

    @property
    def around(self) -> Pair:
        """Padding of the output's gradient, for the input's gradient: a convolution with flipped taps."""
        return self.reach[0] - self.padding[0], self.reach[1] - self.padding[1]

    def after(self, size: Sequence[int]) -> list[int]:
        """Height and width of the convolution's output."""
        terms = zip(size, self.padding, self.reach, self.stride, strict=True)
        return [(side + 2 * padding - reach - 1) // stride + 1 for side, padding, reach, stride in terms]

    def before(self, size: Sequence[int]) -> list[int]:
        """Height and width of the transposed convolution's output."""
        terms = zip(size, self.padding, self.reach, self.stride, self.extra, strict=True)
        return [(side - 1) * stride - 2 * padding + reach + extra + 1 for side, padding, reach, stride, extra in terms]


def geometry_of(
    weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    extra: Sequence[int], groups: int,
) -> Geometry:
    """The geometry from a weight's shape and the arguments of ATen's `convolution`.

    A 1-D convolution is a 2-D one of images of height 1, and a linear layer one of single pixels.
    """
    depthwise = groups > 1 and weight[1] == 1
    kernel, stride, padding, dilation = (
        _pair(values, first) for values, first in ((weight[2:], 1), (stride, 1), (padding, 0), (dilation, 1))
    )
    return Geometry(kernel, stride, padding, dilation, groups, depthwise, transposed, _pair(extra, 0))


def _pair(values: Sequence[int], first: int) -> Pair:
    """Values of two axes; `first` is that of an axis that the convolution does not have."""
    rows, columns = (first, first, *values)[-2:]
    return rows, columns
