"""Networks as users write them (`zoo.py`): each copy gets its own gradients, buffers and outputs by every route.

The tests on a GPU have the precision in their name, because the first step of a route may take long to compile:
`-k "gpu and bf16"` runs the usual precision alone, and `-m slow -k fp64` or `-m slow -k fp32` the others.
"""

import math
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from zoo import ZOO, Entry

import quasiglobal.stacked.routes
from quasiglobal.common.modules import converted, copied
from quasiglobal.stacked.kernels.network import kernel_network
from quasiglobal.stacked.layout import Layout, own_state
from quasiglobal.stacked.one_model import Gradients, arguments
from quasiglobal.stacked.precision import PRECISIONS, full_precision
from quasiglobal.stacked.routes import Compiled, OneByOne, Route, Traced, Vectorised
from quasiglobal.stacked.stack import Stack
from quasiglobal.stacked.stackable import no_fast_path

K, BATCH = 2, 3

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),                   # from torch.compile's own imports
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),   # RMSNorm under autocast
]


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
    def of(cls, name, precision="fp64", device="cpu", seed=0):
        entry, dtype = ZOO[name], PRECISIONS[precision]
        torch.manual_seed(seed)
        module = entry.module()
        if name == "teacher":
            own_state(module, ["teacher.weight", "teacher.bias", "mean"])
        layout = Layout.of(module)
        x = layout.row(dict(module.named_parameters())).repeat(K, 1)
        x = x + 0.01 * torch.randn_like(x)
        buffers = {name: torch.stack([value] * K) for name, value in Layout.buffers(module).items()}
        generator = torch.Generator().manual_seed(seed)
        batches = [entry.batch(generator, BATCH, torch.float32) for _ in range(K)]
        inputs, targets = tree_map(lambda *values: torch.stack(values), *batches)
        return cls(entry, module, layout, x, buffers, inputs, targets).to(device, dtype)

    def to(self, device, dtype):
        """The same copies elsewhere, in another precision."""
        def there(value):
            return value.to(device, dtype if value.is_floating_point() else None)

        module = converted(copied(self.module), torch.device(device), dtype)
        values = tree_map(there, (self.x, self.buffers, self.inputs, self.targets))
        return Copies(self.entry, module, self.layout, *values)

    def stacked(self, precision="fp64", route=None):
        return Stack(self.module, self.entry.loss, self.layout, precision, route=route)

    def gradients(self, model):
        """The copies' gradients; a network may write into its inputs."""
        return model.gradients(self.x, self.buffers, tree_map(torch.clone, self.inputs), self.targets)

    def outputs(self, model):
        """Outputs [copy, batch, …] of every copy on every batch."""
        return model.outputs(self.x, self.buffers, self.inputs)

    def alone(self, i):
        """The i-th copy as a module of its own."""
        module = copied(self.module)
        values = self.layout.views(self.x[i]) | {name: value[i] for name, value in self.buffers.items()}
        module.load_state_dict(values, strict=False)
        return module

    def gradients_alone(self, precision="fp64"):
        """Losses, gradients and buffers by autograd, one copy after the other."""
        losses, rows, after = [], [], []
        for i in range(K):
            module = self.alone(i).train()
            output = shown(module, at(self.inputs, i), self.x, precision)
            loss = self.entry.loss(output, at(self.targets, i))
            loss.backward()
            losses.append(loss.detach())
            grads = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                for name, p in module.named_parameters()
            }
            rows.append(self.layout.row(grads))
            after.append(Layout.buffers(module))
        return torch.stack(losses), torch.stack(rows), tree_map(lambda *values: torch.stack(values), *after)

    @torch.no_grad()
    def outputs_alone(self, precision="fp64"):
        """The same as `outputs`, one copy after the other."""
        rows = [
            tree_map(lambda *values: torch.stack(values), *(
                shown(self.alone(i).eval(), at(self.inputs, batch), self.x, precision) for batch in range(K)
            ))
            for i in range(K)
        ]
        return tree_map(lambda *values: torch.stack(values), *rows)


def at(values, i):
    return tree_map(lambda value: value[i].clone(), values)


def shown(module, inputs, x, precision):
    """The output as a tensor of the type of x."""
    given, named = arguments(module, inputs)
    device = x.device.type
    cast = torch.autocast(device, torch.bfloat16) if precision == "bf16" else full_precision(device)
    with cast, no_fast_path(x):                             # on a GPU it approximates GELU
        output = module(*given, **named)
    return tree_map(lambda value: value.to(x.dtype), output)


class AsProgram(Route):
    """The kernels' program on a CPU: executed by vmap, or by the kernels in Triton's interpreter."""

    def __init__(self, one, by_kernels):
        super().__init__(one)
        self.by_kernels = by_kernels
        self._programs = {}

    def gradients(self, x, buffers, inputs, targets):
        outputs, after, gradient = self._program(x, buffers, inputs)(x, buffers, inputs)
        losses, right = vmap(self.one.score)(outputs, targets)
        return Gradients(losses.detach(), right, gradient(losses.sum()), after)

    def outputs(self, x, buffers, inputs):
        batches = [batch.expand(K, *batch.shape) for batch in inputs]
        found = [self._program(x, buffers, batch)(x, buffers, batch)[0] for batch in batches]
        return tree_map(lambda *values: torch.stack(values, dim=1), *found)

    def _program(self, x, buffers, inputs):
        module = self.one.module
        if module.training not in self._programs:
            program = kernel_network(module, self.one.layout, x, buffers, inputs, self.by_kernels)
            assert program is not None, "the network cannot be traced, or has no convolution for the kernels"
            self._programs[module.training] = program
        return self._programs[module.training]


ROUTES = {
    "default": None,
    "one-by-one": OneByOne,
    "vmap": Traced,
    "traced": Traced,
    "program": partial(AsProgram, by_kernels=False),
    "kernels": partial(AsProgram, by_kernels=True),
    "compiled": Compiled,
}
ALIKE = {"mobilenet-v3", "resnext", "shufflenet", "squeezenet", "ghostnet", "repvgg", "deeplab"}
"""Networks whose operations others have too."""
FAST = {
    "program": ZOO.keys() - ALIKE,
    "traced": {"conv1d", "highway", "tabular"},
    "kernels": {"odd-kernels", "norms", "autoencoder"},
}
"""Networks that the fast tests run by routes that take long to begin."""


@pytest.fixture
def route(request, monkeypatch):
    """A route by name; `traced` is traced at its first call."""
    if request.param == "traced":
        monkeypatch.setattr(quasiglobal.stacked.routes, "CALLS_BEFORE_TRACING", 0)
    if request.param == "kernels":
        pytest.importorskip("triton")
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("the kernels are compiled here, and have no float64")
    return ROUTES[request.param]


def supports(route, entry):
    if route in ("program", "kernels"):
        return entry.convolutional
    return route in ("default", "one-by-one") or not entry.one_by_one


def cases(*routes, draws=False, fast=FAST):
    """Routes with the networks that they support: all, or those that draw random numbers."""
    return pytest.mark.parametrize(("route", "name"), [
        pytest.param(route, name, marks=() if name in fast.get(route, ZOO) else pytest.mark.slow)
        for route in routes
        for name, entry in ZOO.items()
        if supports(route, entry) and (entry.draws or not draws)
    ], indirect=["route"])


@pytest.fixture
def fixed_draws(monkeypatch):
    """Replace random numbers by fixed ones, equal for all copies; recurrent layers, which draw inside, drop nothing."""
    def uniform(*shape, device=None, dtype=None):
        numbers = torch.arange(math.prod(shape), device=device, dtype=torch.float64)
        return (numbers * 0.6180339887498949 % 1).view(shape).to(dtype or torch.float32)

    def dropout(x, p=0.5, training=True, inplace=False, dims=None):
        if not training or p == 0:
            return x
        shape = (*x.shape[:dims], *(1 for _ in x.shape[dims:])) if dims else x.shape
        kept = (uniform(*shape, device=x.device) >= p).to(x.dtype) / (1 - p)
        return x.mul_(kept) if inplace else x * kept

    def channel_dropout(x, p=0.5, training=True, inplace=False):
        return dropout(x, p, training, inplace, dims=2)

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, *rest, **options):
        return dropout(attended(query, key, value, attn_mask, 0.0, *rest, **options), dropout_p)

    attended, made = functional.scaled_dot_product_attention, nn.RNNBase.__init__
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    for name in ("dropout", "alpha_dropout"):
        monkeypatch.setattr(functional, name, dropout)
    for name in ("dropout2d", "feature_alpha_dropout"):
        monkeypatch.setattr(functional, name, channel_dropout)
    monkeypatch.setattr(torch, "rand", uniform)
    monkeypatch.setattr(torch, "randn_like", lambda x: 3 * uniform(*x.shape, device=x.device, dtype=x.dtype) - 1.5)
    monkeypatch.setattr(nn.RNNBase, "__init__", lambda *args, **options: made(*args, **options | {"dropout": 0.0}))


@cases("default", "one-by-one", "vmap", "traced", "program", "kernels")
def test_gradients_and_buffers_are_each_copys_own(route, name, fixed_draws):
    assert_exact(Copies.of(name), route)


def assert_exact(copies, route=None):
    """The route works, and its gradients and buffers are those of autograd, one copy after the other."""
    model = copies.stacked(route=route)
    before = {key: value.clone() for key, value in copies.buffers.items()}
    with route_kept(copies, model):
        found = copies.gradients(model)
    assert all(copies.buffers[key].equal(before[key]) for key in before), "the input buffers are unchanged"
    assert not any(value.requires_grad for value in found.buffers.values()), "buffers keep the graph of the step alive"
    try:
        assert_equal(copies.layout, found, copies.gradients_alone())
    except AssertionError:                                  # weight_norm and hardswish are less precise on a GPU
        if copies.x.device.type == "cpu":
            raise
        reference = copies.to("cpu", torch.float64).gradients_alone()
        assert_equal(copies.layout, found, tree_map(lambda value: value.to(copies.x.device), reference))


def assert_equal(layout, found, reference):
    """Losses, gradients and buffers agree; a parameter's gradient up to the rounding errors of the largest ones."""
    losses, gradients, buffers = reference
    torch.testing.assert_close(found.losses, losses, rtol=1e-12, atol=1e-14)
    errors = layout.views(found.g - gradients)
    for key, own in layout.views(gradients).items():
        error, norm = (values.reshape(K, -1).norm(dim=1) for values in (errors[key], own))
        assert (error <= 1e-9 * norm + 1e-12 * gradients.norm(dim=1)).all(), key
    for key, value in buffers.items():
        torch.testing.assert_close(found.buffers[key], value, rtol=1e-11, atol=1e-13)


@contextmanager
def route_kept(copies, model):
    """Check that a route was not replaced by a slower one, unless nothing else can help; the log says why."""
    chosen = type(model.route)
    yield
    allowed = (chosen, Vectorised) if copies.entry.uncompiled and copies.x.is_cuda else (chosen,)
    assert copies.entry.one_by_one or type(model.route) in allowed, "the route failed"


@cases("default", "compiled", "program", fast={"program": {"densenet", "in-place", "unet", "vit"}})
def test_outputs_are_each_copys_own(route, name, fixed_draws):
    """`compiled` is compiled later, outputs of the first calls are those of vmap."""
    copies = Copies.of(name)
    model = copies.stacked(route=route)
    outputs = copies.outputs(model)
    if name not in ("in-place", "choosy"):                  # writes into a copy of the inputs, which all copies share
        assert type(model.test_route) is type(model.route), "the route failed"
    torch.testing.assert_close(outputs, copies.outputs_alone(), rtol=1e-10, atol=1e-12)


@cases("default", "vmap", "program", draws=True)
def test_copies_draw_different_numbers_that_the_seed_repeats(route, name):
    copies = Copies.of(name)
    model = copies.stacked(route=route)
    with route_kept(copies, model):
        first = assert_draws(copies, model)
    assert seeded(1, copies, model).g.equal(first.g)
    step = 1e-8 * torch.randn_like(copies.x) * (first.g != 0)      # padding vectors have no gradient
    there, back = (seeded(1, replace(copies, x=copies.x + sign * step), model).losses for sign in (1, -1))
    error = (there - back - 2 * (first.g * step).sum(1)).abs()
    assert (error <= 1e-5 * first.g.norm(dim=1) * step.norm(dim=1)).all(), "the backward pass has the draws of the loss"


def assert_draws(copies, model):
    """A seed repeats the draws, another seed does not, and no two copies have the same draws."""
    first, again, other = (seeded(seed, copies, model) for seed in (1, 1, 2))
    assert first.losses.equal(again.losses)
    assert (first.losses != other.losses).all()
    values = {"x": copies.x, "inputs": copies.inputs, "targets": copies.targets}
    alike = replace(copies, **tree_map(lambda value: torch.stack([value[0]] * K), values))
    found = [seeded(seed, alike, model).losses.unique() for seed in range(1, 6)]    # a small network may drop nothing
    assert any(len(losses) == K for losses in found)
    return first


def seeded(seed, copies, model):
    torch.manual_seed(seed)
    return copies.gradients(model)


@cases("default", "program", draws=True, fast={"default": {"variational-autoencoder"}, "program": {}})
def test_a_network_may_draw_in_a_test(route, name):
    """A variational autoencoder draws its code; dropout is off."""
    copies = Copies.of(name)
    model, found = copies.stacked(route=route), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(tree_leaves(copies.outputs(model))[0])
    assert found[0].equal(found[1])
    assert found[0].equal(found[2]) == (name != "variational-autoencoder")


SHALLOW = {name for name, entry in ZOO.items() if not entry.convolutional} | {"convnext", "mixer", "swin", "vit"}
"""Networks that are not computed one by one on a CPU, where there would be little to test."""


@cases("default", fast={"default": SHALLOW})
def test_bf16_costs_no_precision(route, name, fixed_draws):
    if name == "lstm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch has no LSTM in bf16 on this CPU")
    copies = Copies.of(name, "bf16")
    assert_precise("bf16", copies.stacked("bf16"), copies)


@pytest.mark.slow
def test_compiled_in_bf16_a_maximum_finds_its_gradient(fixed_draws):
    copies = Copies.of("text-cnn", "bf16")
    model = copies.stacked("bf16", route=Compiled)
    with route_kept(copies, model):
        assert_precise("bf16", model, copies)


def assert_precise(precision, model, *draws):
    """The errors against float64 are at most 1.5 times those of this precision, one copy after the other.

    Rounding may move an activation across a ReLU's kink or to another maximum, here or there, which changes a gradient
    by far more than rounding does: the median of several draws counts.
    """
    if draws[0].entry.jumps:
        pytest.skip("rounding errors may change the result by more than their size")
    floor = 1e-6 if precision == "fp32" else 1e-12
    of_gradients, of_outputs = [], []
    for copies in draws:
        exact = copies.to("cpu", torch.float64)             # a GPU's gradient of average pooling may be wrong
        values = copies.gradients(model).g, copies.gradients_alone(precision)[1], exact.gradients_alone()[1]
        of_gradients.append(excess(floor, *values))
        of_outputs.append(excess(floor, copies.outputs(model), copies.outputs_alone(precision), exact.outputs_alone()))
    assert median(of_gradients) <= 1.5
    assert median(of_outputs) <= 1.5


def excess(floor, *values):
    """The error of ours over that of the plain values."""
    ours, plain, best = (torch.cat([leaf.double().cpu().flatten() for leaf in tree_leaves(one)]) for one in values)
    error = (ours - best).norm() - floor * best.norm()
    return float(error / (plain - best).norm()) if error > 0 else 0.0


def on_a_gpu(test):
    """Skip the test without a GPU, and ignore what PyTorch says there about contexts and the layout of weights."""
    ignoring = pytest.mark.filterwarnings("ignore::UserWarning")(test)
    return pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(ignoring)


PRECISION = [pytest.param("fp64", marks=pytest.mark.slow), pytest.param("fp32", marks=pytest.mark.slow), "bf16"]


@on_a_gpu
@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("name", ZOO)
def test_a_gpu_gives_each_copys_own_gradients(name, precision, fixed_draws):
    copies = Copies.of(name, precision, "cuda")
    if precision == "fp64":
        assert_exact(copies)
        return
    model = copies.stacked(precision)
    with route_kept(copies, model):
        others = (Copies.of(name, precision, "cuda", seed) for seed in range(1, 11))
        frozen = copies.module                              # its frozen parts are not in the rows of a model
        assert_precise(precision, model, copies, *(replace(other, module=frozen) for other in others))


@on_a_gpu
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.draws and entry.convolutional])
def test_copies_on_a_gpu_draw_different_numbers_in_bf16(name):
    copies = Copies.of(name, "bf16", "cuda")
    model = copies.stacked("bf16")
    with route_kept(copies, model):
        assert_draws(copies, model)


@on_a_gpu
def test_a_gpu_tests_transformers_one_by_one():
    """PyTorch's fast path for transformers in evaluation needs aligned weights; those of a row are not."""
    copies = Copies.of("vit", "fp32", "cuda")
    outputs = copies.outputs(copies.stacked("fp32", route=OneByOne))
    torch.testing.assert_close(outputs, copies.outputs_alone("fp32"), rtol=1e-4, atol=1e-5)
