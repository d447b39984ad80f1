"""The kernels of normalisations against PyTorch with autograd: results, running statistics and all gradients."""

import os
from functools import partial

import pytest
import torch

from quasiglobal.stacked.kernels.operations import normalise

pytest.importorskip("triton")
if "TRITON_INTERPRET" not in os.environ:
    pytest.skip("the kernels are compiled here, and have no float64", allow_module_level=True)

from quasiglobal.stacked.kernels.normalisation import Normalised

N, EPS, MOMENTUM = 2, 1e-5, 0.1

OWN, ALL = ("evonorm", "group"), ("evonorm", "group", "batch")
SIZES = {
    "whole images": (ALL, 3, 4, (4, 8), 2),
    "odd sizes": (ALL, 2, 6, (5, 7), 6),
    "blocks of channels": (ALL, 1, 128, (3, 2), 32),
    "images in blocks": (OWN, 1, 16, (41, 32), 4),
    "several images in a part": (("batch",), 64, 4, (3, 3), 1),
    "several parts": (("batch",), 16, 64, (21, 16), 1),
    "a part in blocks": (("batch",), 1, 16, (1031, 1), 1),
}
"""Kinds, images, channels, height and width, groups."""

AFTER = {"alone": (False, False), "relu": (False, True), "sum": (True, False), "sum and relu": (True, True)}
CASES = [(kind, size, after) for size, (kinds, *_) in SIZES.items() for kind in kinds for after in AFTER]
FAST = (("odd sizes", "alone"), ("odd sizes", "sum and relu"))


@pytest.mark.parametrize(
    ("kind", "size", "after"),
    [pytest.param(*case, marks=() if case[1:] in FAST else pytest.mark.slow) for case in CASES],
)
def test_the_kernels_compute_the_normalisation_and_its_gradients(kind, size, after):
    (_, batch, channels, shape, groups), (summed, relu) = SIZES[size], AFTER[after]
    torch.manual_seed(0)
    new = partial(torch.randn, dtype=torch.float64)
    x = (new(N, batch, channels, *shape) * 2 + 3 * new(channels, 1, 1)).requires_grad_()
    weight, bias = new(N, channels).requires_grad_(), new(N, channels).requires_grad_()
    rest = new(N, batch, channels, *shape).requires_grad_() if summed else None
    running = [new(N, channels), new(N, channels).exp()] if kind == "batch" else []
    rests = [None] * N if rest is None else rest
    how = kind, groups, EPS, MOMENTUM, relu
    each = [normalise(x[i], weight[i], bias[i], rests[i], [old[i] for old in running], *how) for i in range(N)]
    expected, *statistics = map(torch.stack, zip(*each, strict=True))
    dy = new(expected.shape)
    dx, dw, db, *others = torch.autograd.grad(expected, [x, weight, bias, *([rest] if summed else [])], dy)
    gradients = torch.cat([dw, db], 1)

    shares = []
    y, *found = Normalised.apply(
        partial(_shares, shares, batch, kind, gradients), x.dtype, x, weight, bias, rest, running, *how
    )
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(y, expected)
    close(found[: len(running)], statistics[: len(running)])
    close(torch.autograd.grad(y, [x, *([rest] if summed else [])], dy), (dx, *others))
    close(shares[0].sum(0), gradients)


def _shares(made, batch, kind, gradients):
    """Space for the partial sums of the parameters' gradients, which the test reads later."""
    from quasiglobal.stacked.kernels.normalisation import shares

    made.append(torch.full((shares(batch, kind), *gradients.shape), torch.nan, dtype=gradients.dtype))
    return made[0]
