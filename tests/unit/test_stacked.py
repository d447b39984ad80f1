"""Stacked networks as one program: each model's own gradient, with tensor operations and with the kernels."""

import copy
import os
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from quasiglobal.models import RESIDUAL, build
from quasiglobal.stacked.compiling import traced
from quasiglobal.stacked.kernels.network import Kernels, convolves, is_linear, kernel_network
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.precision import PRECISIONS
from quasiglobal.stacked.routes import Compiled, OneByOne, Vectorised
from quasiglobal.stacked.stack import Stack
from quasiglobal.stacked.stackable import stackable

K, BATCH = 2, 3

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


class Usual(nn.Module):
    """Strides, depthwise and 1 × 1 convolutions, biases, sums, ReLU in place, buffers, pooling, a view."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 5, stride=2, padding=1)
        self.depth = nn.Conv2d(12, 12, 3, groups=12, padding=1)
        self.three = nn.GroupNorm(3, 12)
        self.point = nn.Conv2d(12, 16, 1)
        self.two = nn.GroupNorm(2, 16)
        self.batch = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(16 * 9, 10)

    def forward(self, x):
        x = self.relu(self.stem(x))
        y = self.three(self.depth(x))
        y += x
        y = self.two(self.point(torch.sigmoid(y)))
        y = self.relu(self.batch(y) + y)
        return self.head(nn.functional.max_pool2d(y, 2).view(x.shape[0], -1))


class Unusual(nn.Module):
    """A growing batch, tied and frozen weights, detached and unused branches, layers without a kernel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.unused, self.detached = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.oblong = nn.Conv2d(8, 8, (2, 3), stride=3, padding=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.four = nn.GroupNorm(4, 8)
        self.wide = nn.Conv2d(8, 8, 3, stride=2, padding=3)
        self.frozen = nn.Conv2d(8, 8, 3, padding=1).requires_grad_(False)
        self.batch = nn.BatchNorm2d(8, track_running_stats=False)
        self.sparse = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.plain = nn.BatchNorm2d(8, affine=False)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(torch.cat([x, x.flip(3)])).relu_()
        y = self.twice(self.twice(x))
        self.unused(y)
        y = self.oblong(y + self.detached(x).detach())
        y = self.four(self.up(y)) + torch.tanh(y.mean((2, 3), keepdim=True))
        y = self.batch(self.frozen(self.wide(y * 2 + y))) + self.wide.weight.mean()
        return torch.stack(self.head(self.plain(self.sparse(y)).mean((2, 3))).chunk(2)).mean(0)


class Convolutions(nn.Module):
    """Groups, multipliers, transposed and 1-D convolutions, even kernels of the same size, circular padding."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=(2, 1), padding=(1, 2))
        self.groups = nn.Conv2d(8, 12, 3, stride=(1, 2), padding=1, groups=2)
        self.even = nn.Conv2d(12, 12, (2, 3), padding="same", groups=12, dilation=(1, 2))
        self.more = nn.Conv2d(12, 24, 3, padding=1, groups=12, padding_mode="circular", bias=False)
        self.batch = nn.BatchNorm2d(24)
        self.spread = nn.ConvTranspose2d(24, 12, 3, stride=(2, 1), padding=1, output_padding=(1, 0), groups=12)
        self.up = nn.ConvTranspose2d(12, 8, (1, 2), groups=4)
        self.line = nn.Conv1d(8, 6, 3, stride=2, padding=1)
        self.lines = nn.ConvTranspose1d(6, 6, 2, stride=2, groups=3, bias=False)
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        x = self.groups(self.stem(x))
        y = self.spread(self.batch(self.more(self.even(x))).relu())
        y = self.up(y[:, :, 1::2] + x)[:, :, ::2].flatten(2)
        y = self.lines(torch.nn.functional.gelu(self.line(y)) + 1)
        return self.head(y.mean(2))


class Pooled(nn.Sequential):
    """Convolutions with a bias and a ReLU; one result is pooled, the other is also used otherwise."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 10, 3), nn.ReLU())

    def forward(self, x):
        x = super().forward(x)
        return nn.functional.max_pool2d(x, 2).mean((2, 3)) + x.mean((2, 3))


class Signals(nn.Module):
    """1-D convolutions of inputs [b, channels, length]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(3, 8, 5, stride=2, padding=2)
        self.depth = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((self.batch(self.depth(x)) + x).amax(2))


class Cast(nn.Module):
    """A sum with a large number: its cast changes nothing in float32, but under autocast it saves the digits."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x):
        return self.head((self.stem(x).to(self.head.weight.dtype) + 100).square().mean((2, 3)) - 10_000)


NETWORKS = {"usual": Usual, "unusual": Unusual, "convolutions": Convolutions, "signals": Signals, "pooled": Pooled}
NETWORKS |= {"cast": Cast, "vgg11": partial(build, "vgg11", width=0.125)} | {
    norm: partial(build, "resnet8", norm=norm, width=0.5) for norm in RESIDUAL
}


@pytest.fixture
def by_kernels(request):
    """Whether to use the kernels, which run in Triton's interpreter on a CPU (see conftest.py)."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("the kernels are compiled here, and have no float64")
    return request.param == "kernels"


def example(name, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    module = NETWORKS[name]().to(device, dtype)
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    x = x + 0.01 * torch.randn_like(x)
    buffers = {name: torch.stack([value] * K) for name, value in module.named_buffers()}
    size = {"vgg11": (32, 32), "signals": (30,), "convolutions": (8, 8)}.get(name, (16, 16))
    inputs = torch.randn(K, BATCH, 3, *size, dtype=dtype, device=device)
    return module, layout, x, buffers, inputs, torch.randint(0, 10, (K, BATCH), device=device)


def one_by_one(module, layout, x, buffers, inputs, targets, autocast=False):
    rows, after = [], []
    for i in range(K):
        model = copy.deepcopy(module).train()
        values = layout.views(x[i]) | {name: value[i] for name, value in buffers.items()}
        model.load_state_dict(values, strict=False)
        with torch.backends.cudnn.flags(enabled=False):     # some geometries in bf16 crash in cuDNN's backward pass
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                output = model(inputs[i])
            nn.functional.cross_entropy(output.to(x.dtype), targets[i]).backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        rows.append(layout.row(grads))
        after.append(dict(model.named_buffers()))
    return torch.stack(rows), after


INTERPRETED = ("usual", "signals", "pooled")
"""Networks that the fast tests run in the interpreter, which takes seconds for each."""

CASES = [("operations", name) for name in NETWORKS] + [
    pytest.param("kernels", name, marks=() if name in INTERPRETED else pytest.mark.slow) for name in NETWORKS
]


@pytest.mark.parametrize(("by_kernels", "name"), CASES, indirect=["by_kernels"])
def test_gradients_and_buffers_are_each_models_own(name, by_kernels):
    module, layout, x, buffers, inputs, targets = example(name)
    program = kernel_network(module, layout, x, buffers, inputs, by_kernels)
    before = {key: value.clone() for key, value in buffers.items()}
    assert_own(program, module, layout, x, buffers, inputs, targets)
    assert all(buffers[key].equal(before[key]) for key in buffers), "the input buffers are unchanged"


def assert_own(program, module, layout, x, buffers, inputs, targets):
    """The program's gradients and new buffers are those of autograd, one model after the other."""
    outputs, after, gradient = program(x, buffers, inputs)
    g = gradient(vmap(nn.functional.cross_entropy)(outputs, targets).sum())
    expected, buffers_after = one_by_one(module, layout, x, buffers, inputs, targets)
    assert ((g - expected).norm(dim=1) <= 1e-10 * expected.norm(dim=1)).all()
    for i in range(K):
        for key, value in buffers_after[i].items():
            torch.testing.assert_close(after[key][i], value, rtol=1e-12, atol=1e-14)


def test_casts_are_recorded():
    """Also those that change nothing in the trace; `test_the_kernels_cost_no_precision` shows what they are for."""
    nodes = kernel_network(*example("cast")[:-1]).program.graph.nodes
    assert "aten._to_copy.default" in [str(node.target) for node in nodes]


def test_normalisations_take_over_what_follows_them():
    module, layout, x, buffers, inputs, _ = example("bn")
    nodes = kernel_network(module, layout, x, buffers, inputs).program.graph.nodes
    names = [str(node.target) for node in nodes]
    assert names.count("quasiglobal.normalise.default") == 9
    assert not {"aten.relu.default", "aten.clone.default", "aten.copy.default"} & set(names)
    assert "aten.add.Tensor" not in names
    assert names.count("aten._foreach_add.Scalar") == 1, "the batch counters are added together"


@pytest.mark.parametrize(
    "name", ["signals", *(pytest.param(name, marks=pytest.mark.slow) for name in ("usual", "unusual"))]
)
@pytest.mark.parametrize("by_kernels", ["kernels"], indirect=True)
def test_segments_between_the_kernels_are_functions_of_what_they_read(name, by_kernels, monkeypatch):
    """Compiled on a GPU; here traced: a value missing from a segment's inputs would be wrong at the second x."""
    monkeypatch.setattr("quasiglobal.stacked.kernels.network._compiler_runs", lambda x: True)
    monkeypatch.setattr("quasiglobal.stacked.kernels.network.by_inductor", lambda program: program)
    module, layout, x, buffers, inputs, targets = example(name)
    program = kernel_network(module, layout, x, buffers, inputs, by_kernels)
    assert program.segments
    for _ in range(2):
        assert_own(program, module, layout, x, buffers, inputs, targets)
        x, inputs, targets = x + 0.1 * torch.randn_like(x), torch.randn_like(inputs), targets.flip(1)


def test_what_is_traced_has_a_derivative_where_it_writes():
    """Circular padding writes into slices of new memory."""
    pad, x = vmap(lambda x: nn.functional.pad(x, (1, 2, 0, 1), mode="circular")), torch.randn(2, 3, 4, 5, 5)
    program, weights = traced(pad, (x,)), torch.randn(2, 3, 4, 6, 8)
    found, expected = (grad(lambda x, f=f: (weights * f(x)).sum())(x) for f in (program, pad))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("name", "without"), [("convolutions", 0), ("signals", 0), ("unusual", 4)])
def test_only_convolutions_with_shared_or_frozen_weights_are_left_to_vmap(name, without):
    pytest.importorskip("triton")
    module, layout, x, buffers, inputs, _ = example(name)
    nodes = kernel_network(module, layout, x, buffers, inputs, by_kernels=True).program.graph.nodes
    assert sum("convolution" in str(node.target) for node in nodes) == without
    assert all("kernel" in node.meta for node in nodes if convolves(node))


def test_convolutions_take_over_what_follows_them():
    module, layout, x, buffers, inputs, _ = example("usual")
    nodes = kernel_network(module, layout, x, buffers, inputs).program.graph.nodes
    assert [node.args[-1] for node in nodes if convolves(node) and not is_linear(node)] == [True, False, False]
    assert "aten.relu.default" not in {str(node.target) for node in nodes}


def by_the_kernels(module, precision="fp32"):
    """A stacked model that starts on the route of the kernels; its gradients on random images, and their arguments."""
    torch.manual_seed(0)
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    model = Stack(module, nn.functional.cross_entropy, layout, precision, route=Kernels)
    dtype = PRECISIONS[precision]
    arguments = x.to(dtype), {}, torch.randn(K, BATCH, 3, 16, 16, dtype=dtype), torch.randint(0, 10, (K, BATCH))
    return model, (model.gradients(*arguments), arguments)


def test_a_model_without_convolutions_needs_no_program():
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    assert kernel_network(module, layout, x, {}, torch.randn(K, BATCH, 3, 16, 16)) is None


class Strided(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).as_strided((3, 10), (10, 1))


class Looking(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) * (1.0 if x.amax().item() > -1e9 else 0.0)


class Choosy(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


FAILING = {
    "strides": (Strided(3, 10, 3), Compiled, "Strided fails on the route Kernels (Untraceable: aten.as_strided"),
    "item": (
        nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), Looking()), OneByOne,
        "item in Sequential.2 (Looking) fails on the route Kernels (",
    ),
    "branch": (                                             # after a submodule: the operation is its parent's
        Choosy(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), OneByOne,
        "__bool__ in Choosy fails on the route Kernels (",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_route_that_fails_is_replaced_by_a_slower_one_with_one_line(name, caplog, monkeypatch):
    monkeypatch.setattr("quasiglobal.stacked.routes.by_inductor", lambda program: program)    # needs no compiler
    module, route, begins = FAILING[name]
    model, found = by_the_kernels(module)
    assert type(model.route) is route
    expected, _ = one_by_one(module, model.layout, *found[1])
    torch.testing.assert_close(found[0].g, expected, rtol=1e-5, atol=1e-6)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "quasiglobal"]
    assert said.startswith(begins)
    assert said.endswith(route.cost)
    assert "\n" not in said


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_wrong_gradient_of_a_compiler_is_noticed_at_the_first_step(drop, precision, caplog, monkeypatch):
    """Unless the module draws random numbers: no two computations of its gradient agree."""
    def mistaken(program):
        return lambda *arguments: tree_map(lambda value: 1.01 * value, program(*arguments))

    monkeypatch.setattr("quasiglobal.stacked.routes.by_inductor", mistaken)
    module = nn.Sequential(nn.Flatten(), Dropping(drop), nn.Linear(3 * 16 * 16, 10))
    model, (found, arguments) = by_the_kernels(module, precision)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if drop:
        assert type(model.route) is Kernels
        assert not said
    else:
        assert type(model.route) is Vectorised
        expected, _ = one_by_one(module.to(arguments[0].dtype), model.layout, *arguments)
        torch.testing.assert_close(found.g, expected, rtol=1e-5, atol=1e-6)
        assert re.match(r"Sequential fails .* \(WrongGradient: a gradient has an error of .*\); ", said[0])


class Dropping(nn.Module):
    """Dropout that a search for dropout layers does not find."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return nn.functional.dropout(x, self.p) if self.p else x


def test_a_model_that_fails_by_itself_raises_its_own_error(caplog):
    with pytest.raises(ValueError, match="my own mistake"):
        by_the_kernels(Mistaken(3, 10, 3))
    assert not [record for record in caplog.records if record.name == "quasiglobal"]


class Mistaken(nn.Conv2d):
    def forward(self, x):
        raise ValueError("my own mistake")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_kernels_cost_no_precision(name):
    module, layout, x, buffers, inputs, targets = example(name, torch.float32, "cuda")
    model = Stack(module, nn.functional.cross_entropy, layout, "bf16")
    _, _, ours, _ = model.gradients(x, buffers, inputs, targets)
    plain, _ = one_by_one(module, layout, x, buffers, inputs, targets, autocast=True)
    doubles = {key: value.double() if value.is_floating_point() else value for key, value in buffers.items()}
    exact, _ = one_by_one(module.double(), layout, x.double(), doubles, inputs.double(), targets)
    assert (ours - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-12 * exact.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_test_costs_no_precision(name):
    """Batches stay separate: some networks normalise with the statistics of the current batch."""
    module, layout, x, buffers, inputs, _ = example(name, torch.float32, "cuda")
    model = Stack(module, nn.functional.cross_entropy, layout, "bf16")
    ours = model.outputs(x, buffers, inputs)
    assert any(program for program in model.route.programs.values()), "uses the kernels"
    errors = []
    exact = outputs_one_by_one(copy.deepcopy(module).double(), layout, x.double(), buffers, inputs.double())
    for found in (ours, outputs_one_by_one(module, layout, x, buffers, inputs, autocast=True)):
        errors.append((found.double() - exact).norm())
    assert errors[0] <= 1.5 * errors[1] + 1e-12 * exact.norm()


def outputs_one_by_one(module, layout, x, buffers, inputs, autocast=False):
    rows = []
    for i in range(K):
        values = layout.views(x[i]) | {name: value[i] for name, value in buffers.items()}
        module.load_state_dict(values, strict=False)
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            rows.append(torch.stack([module.eval()(batch) for batch in inputs]))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_pooling_is_pytorchs(dtype):
    pytest.importorskip("triton")
    from quasiglobal.stacked.kernels import pooling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 6, 5, device=device).to(dtype)
    x[0, 0, :4] = 0.0                                       # ties: the first maximum counts
    x[1, 1, 2, 2, 0] = float("nan")
    images = x.flatten(0, 1).movedim(-1, 1).requires_grad_()
    expected = nn.functional.max_pool2d(images, 3)
    dy = torch.randn_like(expected)
    (dx,) = torch.autograd.grad(expected, images, dy)
    y, which = pooling.pool(x, 3)
    torch.testing.assert_close(y.flatten(0, 1).movedim(-1, 1), expected, rtol=0, atol=0, equal_nan=True)
    arrived = dy.movedim(1, -1).unflatten(0, (2, 3)).contiguous()
    back = pooling.pool_back(arrived, None, which, 3)
    torch.testing.assert_close(back.flatten(0, 1).movedim(-1, 1), dx, rtol=0, atol=0)
    (dx,) = torch.autograd.grad(nn.functional.max_pool2d(images.relu(), 3), images, dy)
    y, which = pooling.pool(x.relu(), 3)
    back = pooling.pool_back(arrived, y, which, 3)
    torch.testing.assert_close(back.flatten(0, 1).movedim(-1, 1), dx, rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 11])
def test_weights_are_packed_and_gradients_collected_in_the_kernels_order(n):
    pytest.importorskip("triton")
    from quasiglobal.stacked.kernels import packing

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    size, most = 300, 6
    x = torch.randn(n, 2 * size, device=device).bfloat16().float()          # the interpreter rounds towards 0
    columns, places = torch.randperm(2 * size, device=device)[:size].int(), torch.randperm(size, device=device).int()
    assert packing.pack(x, columns, torch.bfloat16).equal(x[:, columns.long()].bfloat16())
    counts = torch.where(torch.arange(size, device=device) < 260, 1, most).int()    # the first block has one share
    there = torch.arange(most, device=device)[:, None, None] < counts
    shares = torch.randint(-9, 9, (most, n, size), device=device).float()
    shares[:, :, places.long()] = shares.where(there, torch.nan)
    g = torch.full_like(x, 3.0)
    packing.collect(shares, columns, places, counts, g)
    expected = torch.full_like(x, 3.0)
    expected[:, columns.long()] = shares[:, :, places.long()].nan_to_num(0.0).sum(0)
    assert g.equal(expected)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("how", [
    {}, {"padding": 1}, {"padding": 1, "ceil_mode": True}, {"ceil_mode": True, "count_include_pad": False},
    {"padding": 1, "ceil_mode": True, "count_include_pad": False}, {"padding": 1, "stride": 3, "ceil_mode": True},
], ids=str)
def test_average_pooling_is_pytorchs(dims, how):
    pool = {1: nn.functional.avg_pool1d, 2: nn.functional.avg_pool2d}[dims]
    for size in range(5, 10):
        x = torch.randn(2, 3, *(size, 12)[:dims], dtype=torch.float64, requires_grad=True)
        options = {"kernel_size": 3, "stride": 2} | how
        with stackable(x, everywhere=True):
            y = pool(x, **options)
        expected = pool(x, **options)
        dy = torch.randn_like(expected)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, x, dy) for value in (y, expected)))
