"""The attention kernels equal PyTorch's attention. In Triton's interpreter, unless there is a GPU."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from quasiglobal.stacked.compiling import traced
from quasiglobal.stacked.kernels import attention
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.one_model import OneModel
from quasiglobal.stacked.routes import OneByOne, Vectorised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOLERANCE = (torch.float32, 1e-4) if DEVICE == "cuda" else (torch.float64, 1e-10)
"""Products of float64 would need several times a GPU's registers."""
TEXTS, HEADS = 2, 3


def tensors(length, size, dtype=DTYPE):
    """Query, key and value as a model makes them: the heads of a token are adjacent; and a gradient."""
    generator = torch.Generator().manual_seed(length)
    shape = (TEXTS, length, HEADS, size)
    made = [torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype) for _ in range(4)]
    return [one.transpose(1, 2).detach().requires_grad_() for one in made]


def padded(length):
    """A mask of texts of other lengths, one of them so short that others are all padding."""
    lengths = torch.tensor([length, 5], device=DEVICE)
    return (torch.arange(length, device=DEVICE) < lengths[:, None])[:, None, None, :].expand(-1, 1, length, -1)


def gradients(function, query, key, value, dy):
    result = function(query, key, value)
    return [result, *torch.autograd.grad(result, (query, key, value), dy)]


@pytest.mark.parametrize(("length", "size", "masked"), [(16, 16, True), (48, 32, False), (80, 16, True)])
def test_attention_is_pytorchs(length, size, masked):
    query, key, value, dy = tensors(length, size)
    mask = padded(length) if masked else None
    ours = gradients(lambda *given: attention.attend(*given, mask, 0.0, 0.3), query, key, value, dy)
    usual = gradients(
        lambda *given: nn.functional.scaled_dot_product_attention(*given, mask, scale=0.3), query, key, value, dy
    )
    for found, expected in zip(ours, usual, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_dropout_drops_the_same_weights_backward(monkeypatch):
    length = size = 32
    query, key, _, dy = tensors(length, size)
    eye = torch.eye(length, dtype=query.dtype, device=DEVICE).expand(TEXTS, HEADS, -1, -1)
    mask, seeds = padded(length), iter((7, 7, 8))
    monkeypatch.setattr(torch, "randint", lambda *how, **named: torch.tensor([next(seeds)], device=DEVICE))

    def attend(value):
        return attention.attend(query, key, value, mask, 0.25, None)

    dropped = attend(eye).detach()                          # the weights after dropout
    weights = (query @ key.mT * size**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    keeps = (dropped != 0) | (weights == 0)
    seen = mask.expand_as(keeps)
    assert abs(keeps[seen].double().mean() - 0.75) < 0.02
    torch.testing.assert_close(dropped, torch.where(keeps, weights / 0.75, 0.0), rtol=TOLERANCE, atol=TOLERANCE)

    value = tensors(length, size)[2]
    ours = gradients(lambda q, k, v: attention.attend(q, k, v, mask, 0.25, None), query, key, value, dy)
    weights = (query @ key.mT * size**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    usual = torch.where(keeps, weights / 0.75, 0.0) @ value
    for found, expected in zip(ours, [usual, *torch.autograd.grad(usual, (query, key, value), dy)], strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not attend(eye).equal(dropped), "another seed drops others"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("length", [80, 112, 128])
def test_in_16_bits_the_error_is_that_of_pytorchs_kernels(length):
    *given, dy = tensors(length, 64, torch.bfloat16)
    mask = padded(length)
    assert attention.suits(*given, mask, {"dropout_p": 0.0})

    def usual(*given):
        return nn.functional.scaled_dot_product_attention(*given, mask)

    wide = [value.detach().double().requires_grad_() for value in given]
    exact = gradients(usual, *wide, dy.double())
    ours = gradients(lambda *given: attention.attend(*given, mask, 0.0, None), *given, dy)
    for found, theirs, value in zip(ours, gradients(usual, *given, dy), exact, strict=True):
        assert (found - value).norm() <= 1.5 * (theirs - value).norm()


def test_a_query_that_sees_no_key_is_0():
    query, key, value, dy = tensors(16, 16)
    mask = torch.zeros(TEXTS, 1, 16, 16, dtype=torch.bool, device=DEVICE)
    for found in gradients(lambda *given: attention.attend(*given, mask, 0.0, None), query, key, value, dy):
        assert not found.any()


class Attending(nn.Module):
    """A layer of attention with a padded text."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 3 * HEADS * 16), nn.Linear(HEADS * 16, 4)

    def forward(self, x):
        query, key, value = self.into(x).unflatten(-1, (3, HEADS, 16)).permute(2, 0, 3, 1, 4)
        mask = (x[..., 0] > -1)[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        found = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(found.transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.slow
def test_stacked_models_attend_by_the_kernels_also_in_a_trace(monkeypatch):
    monkeypatch.setattr(attention, "suits", lambda *given: True)
    torch.manual_seed(0)
    module = Attending().to(DEVICE, DTYPE)
    layout = Layout.of(module)
    one = OneModel(module, nn.functional.cross_entropy, layout, "fp32")
    x = 0.3 * torch.randn(3, layout.size, dtype=DTYPE, device=DEVICE)
    inputs, targets = torch.randn(3, 2, 16, 8, dtype=DTYPE), torch.zeros(3, 2, dtype=int)
    given = (x, {}, inputs.to(DEVICE), targets.to(DEVICE))
    expected = OneByOne(one).gradients(*given).g
    stacked = Vectorised(one).gradients
    program = traced(stacked, given)
    names = {getattr(node.target, "_opname", "") for node in program.graph.nodes}
    assert {"attend", "attend_back"} <= names
    for found in (stacked(*given).g, program(*given)[2]):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
