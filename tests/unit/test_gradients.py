"""Stacked gradients equal each model's own gradient, without loss of precision."""

import copy

import pytest
import torch
from torch import nn
from torch.func import vmap

from quasiglobal.metrics import accuracy
from quasiglobal.models import build
from quasiglobal.stacked.compiling import traced
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.precision import PRECISIONS
from quasiglobal.stacked.routes import OneByOne, Traced, Vectorised
from quasiglobal.stacked.stack import Stack
from quasiglobal.stacked.stackable import cross_entropy

NORMS = ("bn", "gn", "evonorm", "evonorm-released")
SMALL = [("mlp", None, "cpu"), ("cnn", "none", "cpu"), *(("cnn", norm, "cpu") for norm in NORMS)]
DEEP = [*(("resnet8", norm, "cpu") for norm in NORMS), ("vgg11", None, "cpu")]
ON_A_GPU = [("resnet8", norm, "cuda") for norm in NORMS if torch.cuda.is_available()]
SIZES = {
    "mlp": ((1, 8, 8), 1.0), "cnn": ((1, 8, 8), 1.0), "resnet8": ((3, 16, 16), 1.0), "vgg11": ((3, 32, 32), 0.125),
    "resnet18": ((3, 64, 64), 0.125),
}
K, BATCH = 3, 8

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")     # from torch.compile's own imports


def stacked(name, norm, device, precision, route=None):
    """K models near one start, with the default route of this machine or a given route."""
    torch.manual_seed(0)
    shape, width = SIZES[name]
    module = build(name, norm=norm, shape=shape, width=width).to(PRECISIONS[precision])
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    x = x + 0.01 * torch.randn(x.shape, dtype=x.dtype)
    buffers = {name: torch.stack([value] * K).to(device) for name, value in module.named_buffers()}
    inputs, targets = torch.randn(K, BATCH, *shape, dtype=x.dtype), torch.randint(0, 10, (K, BATCH))
    model = Stack(module.to(device), nn.functional.cross_entropy, layout, precision, route=route, right=accuracy)
    return model, x.to(device), buffers, inputs.to(device), targets.to(device)


def one_by_one(model, x, buffers, inputs, targets, precision):
    gradients, after, losses = [], [], []
    for i in range(K):
        module = copy.deepcopy(model.module)
        values = model.layout.views(x[i]) | {name: value[i] for name, value in buffers.items()}
        module.load_state_dict(values)
        module.train()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            output = module(inputs[i])
        loss = nn.functional.cross_entropy(output.to(x.dtype), targets[i])
        loss.backward()
        losses.append(loss.detach())
        gradients.append(model.layout.row({name: p.grad for name, p in module.named_parameters()}))
        after.append(dict(module.named_buffers()))
    return torch.stack(losses), torch.stack(gradients), after


WIDE = [("resnet18", norm, "cpu") for norm in NORMS]
ROUTES = [
    *((case, route) for case in SMALL for route in (Traced, OneByOne)),
    *((case, OneByOne) for case in (*DEEP, *WIDE)),
    (DEEP[0], Traced),
    *(pytest.param(case, Traced, marks=pytest.mark.slow) for case in (*DEEP[1:], *WIDE)),   # never chosen on a CPU
    *((case, None) for case in ON_A_GPU),
]


@pytest.mark.parametrize(("case", "route"), ROUTES, ids=str)
def test_gradients_and_buffers_are_each_models_own(case, route):
    model, x, buffers, inputs, targets = stacked(*case, "fp64", route)
    before = {name: value.clone() for name, value in buffers.items()}
    losses, right, g, after = model.gradients(x, buffers, inputs, targets)
    expected, gradients, expected_buffers = one_by_one(model, x, buffers, inputs, targets, "fp64")
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert ((g - gradients).norm(dim=1) <= 1e-10 * gradients.norm(dim=1)).all()
    for i in range(K):
        for key, value in expected_buffers[i].items():
            torch.testing.assert_close(after[key][i], value, rtol=1e-12, atol=1e-14)
    assert all(buffers[key].equal(before[key]) for key in buffers), "the input buffers are unchanged"
    outputs = torch.stack([_train_output(model, x[i], buffers, i, inputs[i]) for i in range(K)])
    assert right.equal((outputs.argmax(dim=-1) == targets).to(x.dtype).mean(dim=1))


def _train_output(model, row, buffers, i, inputs):
    module = copy.deepcopy(model.module)
    module.load_state_dict(model.layout.views(row) | {name: value[i] for name, value in buffers.items()})
    module.train()
    with torch.no_grad():
        return module(inputs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "norm", "device"), [
    *SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in DEEP), *ON_A_GPU,
])
def test_stacking_costs_no_precision(name, norm, device, precision):
    model, x, buffers, inputs, targets = stacked(name, norm, device, precision)
    _, _, ours, _ = model.gradients(x, buffers, inputs, targets)
    _, plain, _ = one_by_one(model, x, buffers, inputs, targets, precision)
    exact_model, *_ = stacked(name, norm, device, "fp64")
    doubles = {key: value.double() if value.is_floating_point() else value for key, value in buffers.items()}
    _, exact, _ = one_by_one(exact_model, x.double(), doubles, inputs.double(), targets, "fp64")
    assert (ours - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-12 * exact.norm()


@pytest.mark.parametrize(("name", "norm", "device"), [*SMALL, *DEEP, *ON_A_GPU])
def test_outputs_are_each_models_own(name, norm, device):
    model, x, buffers, inputs, _ = stacked(name, norm, device, "fp64")
    outputs = model.outputs(x, buffers, inputs)
    for i in range(K):
        module = copy.deepcopy(model.module)
        module.load_state_dict(model.layout.views(x[i]) | {key: value[i] for key, value in buffers.items()})
        module.eval()
        for batch in range(K):
            expected = module(inputs[batch]).detach()
            torch.testing.assert_close(outputs[i, batch], expected, rtol=1e-10, atol=1e-12)


class Padded(nn.Module):
    """Classifier on the sum of token embeddings, padding included."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.head = nn.Linear(4, 10)

    def forward(self, ids):
        return self.head(self.embedding(ids).sum(dim=-2))


def test_padding_is_not_learned_by_any_model():
    module = Padded().double()
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    ids, targets = torch.randint(0, 3, (K, BATCH, 5)), torch.randint(0, 10, (K, BATCH))
    _, _, g, _ = Stack(module, nn.functional.cross_entropy, layout, "fp64").gradients(x, {}, ids, targets)
    for i in range(K):
        module.zero_grad()
        nn.functional.cross_entropy(module(ids[i]), targets[i]).backward()
        torch.testing.assert_close(g[i], layout.row({name: p.grad for name, p in module.named_parameters()}))


def test_a_trace_does_not_depend_on_the_strides_of_its_arguments():
    """A compiler may choose other strides than those that were traced."""
    def flat(x):
        return x.sin().view(len(x), -1)

    def written(x):
        y = x.clone()
        z = y.view(-1)
        y[0, 0, 0] = 5.0
        return z

    x = torch.randn(2, 4, 3)
    assert traced(flat, (x,))(x.mT.clone().mT).equal(flat(x))
    assert traced(written, (x,))(x.mT.clone().mT).equal(written(x)), "a view of memory that is written into"


def test_the_stacked_cross_entropy_has_the_bits_of_pytorchs():
    torch.manual_seed(0)
    outputs, targets = torch.randn(3, 33, 7, requires_grad=True), torch.randint(0, 7, (3, 33))
    own, theirs = (vmap(loss)(outputs, targets) for loss in (cross_entropy, nn.functional.cross_entropy))
    assert torch.equal(own, theirs)
    assert torch.equal(*(torch.autograd.grad(losses.sum(), outputs)[0] for losses in (own, theirs)))


class Shared(nn.Module):
    """Two parts with one buffer: one writes it, the other reads it."""

    def __init__(self):
        super().__init__()
        self.writer, self.reader, self.layer = nn.Module(), nn.Module(), nn.Linear(2, 1)
        self.reader.register_buffer("calls", torch.zeros(()))
        self.writer.register_buffer("calls", self.reader.calls)

    def forward(self, x):
        self.writer.calls.add_(1.0)
        return self.layer(x) * self.reader.calls


@pytest.mark.parametrize("route", [Vectorised, OneByOne])
def test_parts_of_a_model_share_a_buffer(route):
    torch.manual_seed(0)
    module = Shared()
    stack = Stack(module, nn.functional.mse_loss, route=route)
    x, buffers = stack.start(range(K))
    inputs, targets = torch.ones(K, BATCH, 2), torch.zeros(K, BATCH, 1)
    for _ in range(3):
        found = stack.gradients(x, buffers, inputs, targets)
        expected = nn.functional.mse_loss(module(inputs[0]), targets[0]).detach()
        torch.testing.assert_close(found.losses, expected.expand(K))
        buffers = found.buffers
    assert type(stack.route) is route
