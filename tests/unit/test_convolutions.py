"""The kernels of convolutions with what follows, against PyTorch, over a table of geometries: results and gradients."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from quasiglobal.stacked.kernels.operations import Geometry, convolve, geometry_of

pytest.importorskip("triton")
if "TRITON_INTERPRET" not in os.environ:
    pytest.skip("the kernels are compiled here, and have no float64", allow_module_level=True)

from quasiglobal.stacked.kernels.convolution import Convolution
from quasiglobal.stacked.kernels.sweep import suits

N, BATCH = 2, 2

PLAIN = {
    "3×3": ((5, 6), (7, 6), Geometry((3, 3), padding=(1, 1))),
    "1×3": ((16, 5), (6, 5), Geometry((1, 3), padding=(0, 1))),
    "3×1 with strides": ((5, 16), (7, 6), Geometry((3, 1), (2, 3), (1, 0))),
    "dilation": ((4, 3), (9, 8), Geometry((3, 2), padding=(2, 1), dilation=(2, 3))),
    "dilation and strides": ((4, 3), (9, 11), Geometry((3, 3), (2, 3), (3, 1), (2, 2))),
}
SWEPT = {
    "swept 3×3": ((16, 16), (10, 67), Geometry((3, 3), padding=(1, 1))),
    "swept 3×3, wide": ((32, 32), (17, 34), Geometry((3, 3), padding=(1, 1))),
    "swept 3×3, one row": ((16, 16), (1, 5), Geometry((3, 3), padding=(1, 1))),
    "swept 2×3": ((24, 16), (9, 8), Geometry((2, 3), padding=(0, 2))),
    "swept 3×2": ((16, 24), (8, 7), Geometry((3, 2), padding=(2, 0))),
    "swept 2×1, padded far": ((20, 17), (3, 4), Geometry((2, 1), padding=(2, 1))),
    "swept 3×1": ((16, 32), (7, 3), Geometry((3, 1))),
}
GROUPED = {
    "4 groups of 4": ((16, 16), (5, 4), Geometry((3, 3), padding=(1, 1), groups=4)),
    "12 groups of 4": ((48, 48), (3, 3), Geometry((3, 3), padding=(1, 1), groups=12)),
    "wide groups with strides": ((40, 80), (4, 5), Geometry((3, 2), (2, 1), (1, 0), groups=2)),
    "odd groups": ((15, 9), (4, 3), Geometry((2, 2), dilation=(1, 2), padding=(1, 1), groups=3)),
}
DEPTHWISE = {
    "depthwise 3×3": ((20, 20), (5, 9), Geometry((3, 3), padding=(1, 1))),
    "depthwise 7×7": ((16, 16), (4, 5), Geometry((7, 7), padding=(3, 3))),
    "depthwise strides": ((6, 6), (7, 9), Geometry((3, 3), (2, 2), (1, 1))),
    "depthwise dilation, strides": ((6, 6), (9, 10), Geometry((3, 2), (2, 3), (1, 2), (2, 2))),
    "multiplier": ((5, 15), (5, 4), Geometry((3, 3), (1, 2), (1, 1))),
    "1-D multiplier": ((3, 6), (1, 20), Geometry((1, 5), (1, 2), (0, 3))),
}
TRANSPOSED = {
    "transposed": ((5, 6), (7, 6), Geometry((2, 2), (2, 2))),
    "transposed, padded": ((4, 3), (4, 3), Geometry((3, 2), (2, 3), (1, 1), (1, 2), extra=(1, 2))),
    "transposed swept": ((16, 20), (5, 6), Geometry((3, 3), padding=(1, 0))),
    "transposed groups": ((8, 12), (3, 4), Geometry((3, 3), (1, 2), (1, 0), groups=4)),
    "transposed depthwise": ((6, 6), (3, 4), Geometry((3, 3), (2, 2), (1, 1), groups=6)),
    "transposed multiplier": ((12, 4), (3, 4), Geometry((3, 2), (2, 1), groups=4)),
    "transposed narrow": ((4, 12), (3, 4), Geometry((2, 2), (2, 2), groups=4)),
}
"""Channels in and out, height and width, geometry."""

CASES = PLAIN | SWEPT | GROUPED
CASES |= {name: (c, size, replace(g, groups=c[0], depthwise=True)) for name, (c, size, g) in DEPTHWISE.items()}
CASES |= {
    name: (c, size, replace(g, transposed=True, depthwise=c[1] == g.groups > 1))
    for name, (c, size, g) in TRANSPOSED.items()
}


AFTER = {"alone": (False, False, False), "bias": (True, False, False), "bias, sum and relu": (True, True, True)}
FAST = {
    "alone": ("swept 2×3", "dilation and strides", "odd groups", "depthwise dilation, strides", "transposed, padded"),
    "bias, sum and relu": ("swept 3×1", "3×3", "1-D multiplier", "transposed groups"),
}


@pytest.mark.parametrize(("name", "after"), [
    pytest.param(name, after, marks=() if name in FAST.get(after, ()) else pytest.mark.slow)
    for after in AFTER for name in CASES
])
def test_the_kernels_compute_pytorchs_convolution_and_its_gradients(name, after):
    (inner, outer), size, geometry = CASES[name]
    biased, summed, relu = AFTER[after]
    torch.manual_seed(0)
    new = partial(torch.randn, dtype=torch.float64)
    left, right = (inner, outer) if geometry.transposed else (outer, inner)
    w = new(N, left, right // geometry.groups, *geometry.kernel).requires_grad_()
    x = new(N, BATCH, inner, *size).requires_grad_()
    shape = geometry.before(size) if geometry.transposed else geometry.after(size)
    bias = new(N, 2 * outer)[:, :outer].requires_grad_() if biased else None
    rest = new(N, BATCH, outer, *shape).requires_grad_() if summed else None
    how = geometry.stride, geometry.padding, geometry.dilation, geometry.transposed, geometry.extra, geometry.groups
    of_each = [[None] * N if value is None else value for value in (bias, rest)]
    each = [convolve(x[i], w[i], *(value[i] for value in of_each), *how, relu) for i in range(N)]
    expected = torch.stack(each)
    dy, later = torch.randn_like(expected), torch.randn_like(x)
    inputs = [value for value in (x, w, bias, rest) if value is not None]
    dx, dw, *others = torch.autograd.grad([expected, x * 1], inputs, [dy, later])

    order = (0, *(1 + dim for dim in geometry.order))
    values = w.detach().permute(order).contiguous()
    shares, of_bias = (new(2, *sizes) * torch.nan for sizes in (values.shape, (N, outer)))
    y, passed = Convolution.apply(lambda: shares, lambda: of_bias, values, x, w, bias, rest, geometry, relu, False)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(y, expected)
    found = torch.autograd.grad([y, passed], [x, rest] if summed else [x], [dy, later])
    close(found, (dx, *others[biased:]))
    close(shares.sum(0), dw.permute(order))
    if biased:
        close(of_bias.sum(0), others[0])


def test_few_channels_are_swept():
    assert {name for name, (channels, _, geometry) in CASES.items() if suits(geometry, *channels)} == {
        *SWEPT, "transposed swept"
    }


def test_geometries_are_those_of_pytorchs_layers():
    for (inner, outer), _, geometry in CASES.values():
        kind = nn.ConvTranspose2d if geometry.transposed else nn.Conv2d
        weight = kind(inner, outer, geometry.kernel, groups=geometry.groups).weight
        how = geometry.stride, geometry.padding, geometry.dilation, geometry.transposed, geometry.extra
        assert geometry_of(weight.shape, *how, geometry.groups) == geometry


def test_a_1d_convolution_has_images_of_height_1():
    weight = nn.Conv1d(8, 16, 3, groups=8).weight
    expected = Geometry((1, 3), (1, 2), (0, 1), groups=8, depthwise=True)
    assert geometry_of(weight.shape, [2], [1], [1], False, [0], 8) == expected
