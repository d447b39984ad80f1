"""Networks as users write them (`zoo.py`): each copy gets its own gradients, buffers and outputs by every route.

The tests on a GPU have the precision in their name, because the first step of a route may take long to compile:
`-k bf16` runs the usual precision alone, and `-m slow -k fp64` or `-k fp32` the others.
"""

import copy
import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from zoo import ZOO, Entry

import quasiglobal.gradients.routes
from quasiglobal.gradients.kernels.program import stacked_program
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.one_model import Gradients, arguments
from quasiglobal.gradients.precision import PRECISIONS
from quasiglobal.gradients.routes import OneByOne, Route, Traced
from quasiglobal.gradients.stack import StackedModel

K, BATCH = 2, 3

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")     # from torch.compile's own imports


@dataclass
class Copies:
    """K copies of a network, near each other, and a batch for each."""

    entry: Entry
    module: nn.Module
    layout: Layout
    x: torch.Tensor
    buffers: dict[str, torch.Tensor]
    inputs: Any
    targets: Any

    @classmethod
    def of(cls, name, precision="fp64", device="cpu"):
        entry, dtype = ZOO[name], PRECISIONS[precision]
        torch.manual_seed(0)
        module = entry.module()
        layout = Layout.of(module)
        x = layout.row(dict(module.named_parameters())).repeat(K, 1)
        x = x + 0.01 * torch.randn_like(x)
        buffers = {name: torch.stack([value] * K) for name, value in Layout.buffers(module).items()}
        generator = torch.Generator().manual_seed(0)
        batches = [entry.batch(generator, BATCH, torch.float32) for _ in range(K)]
        inputs, targets = tree_map(lambda *values: torch.stack(values), *batches)
        return cls(entry, module, layout, x, buffers, inputs, targets).to(device, dtype)

    def to(self, device, dtype):
        """The same copies elsewhere, in another precision."""
        def there(value):
            return value.to(device, dtype if value.is_floating_point() else None)

        module = copy.deepcopy(self.module).to(device, dtype)
        values = tree_map(there, (self.x, self.buffers, self.inputs, self.targets))
        return Copies(self.entry, module, self.layout, *values)

    def stacked(self, precision="fp64", route=None):
        return StackedModel(self.module, self.entry.loss, self.layout, precision, route=route)

    def gradients(self, model):
        return model.gradients(self.x, self.buffers, self.inputs, self.targets)

    def alone(self, i):
        """The i-th copy as a module of its own."""
        module = copy.deepcopy(self.module)
        values = self.layout.views(self.x[i]) | {name: value[i] for name, value in self.buffers.items()}
        module.load_state_dict(values, strict=False)
        return module

    def gradients_alone(self, autocast=False):
        """Losses, gradients and buffers by autograd, one copy after the other."""
        losses, rows, after = [], [], []
        for i in range(K):
            module = self.alone(i).train()
            output = shown(module, at(self.inputs, i), self.x, autocast)
            loss = self.entry.loss(output, at(self.targets, i))
            loss.backward()
            losses.append(loss.detach())
            grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
            rows.append(self.layout.row(grads))
            after.append(Layout.buffers(module))
        return torch.stack(losses), torch.stack(rows), tree_map(lambda *values: torch.stack(values), *after)

    @torch.no_grad()
    def outputs_alone(self, autocast=False):
        """Outputs [copy, batch, …] of every copy on every batch."""
        rows = [
            tree_map(lambda *values: torch.stack(values), *(
                shown(self.alone(i).eval(), at(self.inputs, batch), self.x, autocast) for batch in range(K)
            ))
            for i in range(K)
        ]
        return tree_map(lambda *values: torch.stack(values), *rows)


def at(values, i):
    return tree_map(lambda value: value[i], values)


def shown(module, inputs, x, autocast):
    """The output in the precision of x."""
    given, named = arguments(module, inputs)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        output = module(*given, **named)
    return tree_map(lambda value: value.to(x.dtype), output)


class AsProgram(Route):
    """The kernels' program on a CPU: executed by vmap, or by the kernels in Triton's interpreter."""

    def __init__(self, one, by_kernels):
        super().__init__(one)
        self.by_kernels = by_kernels

    def gradients(self, x, buffers, inputs, targets):
        outputs, after, gradient = self._program(x, buffers, inputs)(x, buffers, inputs)
        losses, right = vmap(self.one.score)(outputs, targets)
        return Gradients(losses.detach(), right, gradient(losses.sum()), after)

    def outputs(self, x, buffers, inputs):
        batches = [batch.expand(K, *batch.shape) for batch in inputs]
        found = [self._program(x, buffers, batch)(x, buffers, batch)[0] for batch in batches]
        return tree_map(lambda *values: torch.stack(values, dim=1), *found)

    def _program(self, x, buffers, inputs):
        program = stacked_program(self.one.module, self.one.layout, x, buffers, inputs, self.by_kernels)
        assert program is not None, "the network cannot be traced, or has no convolution for the kernels"
        return program


ROUTES = {
    "default": None,
    "one-by-one": OneByOne,
    "vmap": Traced,
    "traced": Traced,
    "program": partial(AsProgram, by_kernels=False),
    "kernels": partial(AsProgram, by_kernels=True),
}
INTERPRETED = ("convnext", "mobilenet-v2", "odd-kernels")
"""Networks that the fast tests run in the interpreter, which takes seconds for each."""


@pytest.fixture
def route(request, monkeypatch):
    """A route by name; `traced` is traced at its first call."""
    if request.param == "traced":
        monkeypatch.setattr(quasiglobal.gradients.routes, "CALLS_BEFORE_TRACING", 0)
    if request.param == "kernels":
        pytest.importorskip("triton")
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("the kernels are compiled here, and have no float64")
    return ROUTES[request.param]


def supports(route, entry):
    if route in ("program", "kernels"):
        return entry.convolutional
    return route in ("default", "one-by-one") or not entry.one_by_one


def cases(*routes, draws=False):
    """The routes with the networks that they support, all or those that draw random numbers."""
    return pytest.mark.parametrize(("route", "name"), [
        pytest.param(route, name, marks=pytest.mark.slow if route == "kernels" and name not in INTERPRETED else ())
        for route in routes
        for name, entry in ZOO.items()
        if supports(route, entry) and (entry.draws or not draws)
    ], indirect=["route"])


@pytest.fixture
def fixed_draws(monkeypatch):
    """Replace random numbers by fixed ones, equal for all copies. (Recurrent layers draw inside: without dropout.)"""
    def uniform(*shape, device=None, dtype=None):
        numbers = torch.arange(math.prod(shape), device=device, dtype=torch.float64)
        return (numbers * 0.6180339887498949 % 1).view(shape).to(dtype or torch.float32)

    def dropout(x, p=0.5, training=True, inplace=False, dims=None):
        if not training or p == 0:
            return x
        shape = (*x.shape[:dims], *(1 for _ in x.shape[dims:])) if dims else x.shape
        kept = (uniform(*shape, device=x.device) >= p).to(x.dtype) / (1 - p)
        return x.mul_(kept) if inplace else x * kept

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, **options):
        return dropout(attended(query, key, value, attn_mask, **options), dropout_p)

    attended = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    for name in ("dropout", "alpha_dropout"):
        monkeypatch.setattr(functional, name, dropout)
    for name in ("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"):
        monkeypatch.setattr(functional, name, partial(dropout, dims=2))
    monkeypatch.setattr(torch, "rand", uniform)
    monkeypatch.setattr(torch, "randn_like", lambda x: 3 * uniform(*x.shape, device=x.device, dtype=x.dtype) - 1.5)
    made = nn.RNNBase.__init__
    monkeypatch.setattr(nn.RNNBase, "__init__", lambda *args, **options: made(*args, **options | {"dropout": 0.0}))


@cases("default", "one-by-one", "vmap", "traced", "program", "kernels")
def test_gradients_and_buffers_are_each_copys_own(route, name, fixed_draws):
    copies = Copies.of(name)
    model = copies.stacked(route=route)
    chosen, before = type(model.route), {key: value.clone() for key, value in copies.buffers.items()}
    losses, _, g, after = copies.gradients(model)
    assert type(model.route) is (OneByOne if copies.entry.one_by_one else chosen), "the route failed"
    expected, gradients, buffers = copies.gradients_alone()
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-14)
    assert_gradients_close(copies.layout, g, gradients)
    for key, value in buffers.items():
        torch.testing.assert_close(after[key], value, rtol=1e-11, atol=1e-13)
    assert all(copies.buffers[key].equal(before[key]) for key in before), "the input buffers are unchanged"


def assert_gradients_close(layout, g, expected):
    """Each parameter's gradient agrees to 1e-9, up to rounding errors of larger gradients."""
    found = layout.views(g - expected)
    for name, own in layout.views(expected).items():
        error, norm = (values.flatten(1).norm(dim=1) for values in (found[name], own))
        assert (error <= 1e-9 * norm + 1e-12 * expected.norm(dim=1)).all(), name


@cases("default", "program")
def test_outputs_are_each_copys_own(route, name, fixed_draws):
    copies = Copies.of(name)
    outputs = copies.stacked(route=route).outputs(copies.x, copies.buffers, copies.inputs)
    torch.testing.assert_close(outputs, copies.outputs_alone(), rtol=1e-10, atol=1e-12)


@cases("default", "vmap", "program", draws=True)
def test_copies_draw_different_numbers_that_the_seed_repeats(route, name):
    """The gradient is that of the loss with the same draws: it predicts the change of the loss along a direction."""
    copies = Copies.of(name)
    model, x = copies.stacked(route=route), copies.x
    chosen = type(model.route)

    def seeded(seed, x):
        torch.manual_seed(seed)
        return model.gradients(x, copies.buffers, copies.inputs, copies.targets)

    first, again, other = seeded(1, x), seeded(1, x), seeded(2, x)
    assert type(model.route) is chosen, "the route failed"
    assert first.g.equal(again.g)
    assert not first.losses.allclose(other.losses)
    step = 1e-6 * torch.randn_like(x)
    change = seeded(1, x + step).losses - seeded(1, x - step).losses
    assert ((change - 2 * (first.g * step).sum(1)).abs() <= 1e-5 * first.g.norm(dim=1) * step.norm(dim=1)).all()
    copies.inputs, copies.targets = tree_map(
        lambda values: values[:1].expand_as(values).contiguous(), (copies.inputs, copies.targets)
    )
    one, two = seeded(1, x[:1].expand_as(x).contiguous()).losses
    assert not one.allclose(two)


@cases("default", "program", draws=True)
def test_a_network_that_draws_can_be_tested(route, name):
    """Dropout is off in a test; a variational autoencoder draws its code there too."""
    copies = Copies.of(name)
    model = copies.stacked(route=route)
    torch.manual_seed(1)
    outputs = tree_leaves(model.outputs(copies.x, copies.buffers, copies.inputs))[0]
    assert outputs.isfinite().all()
    if name != "variational-autoencoder":
        torch.testing.assert_close(outputs, copies.outputs_alone(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ZOO)
def test_bf16_costs_no_precision(name, fixed_draws):
    assert_as_precise(Copies.of(name, "bf16"), "bf16")


def assert_as_precise(copies, precision, floor=1e-12):
    """The error against float64 is at most 1.5 times that of autograd in this precision, one copy after the other."""
    model = copies.stacked(precision)
    chosen = type(model.route)
    ours = copies.gradients(model).g
    assert type(model.route) is (OneByOne if copies.entry.one_by_one else chosen), "the route failed"
    _, plain, _ = copies.gradients_alone(autocast=precision == "bf16")
    _, exact, _ = copies.to(copies.x.device, torch.float64).gradients_alone()
    assert (ours - exact).norm() <= 1.5 * (plain - exact).norm() + floor * exact.norm()
