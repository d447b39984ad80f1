"""Networks that keep a state of their own, or do something unusual, trained by `qg.train` (`zoo_habits.py`)."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo_habits import Embeddings, Fourier, Layers, NormalisesInPlace, Rotary, Teacher, distance

import quasiglobal as qg
from quasiglobal.common.modules import copied

N, LR = 4, 0.1


def trained(module, loss, inputs, targets, **settings):
    """Train on a part of the data for each node, without communication, in the order of the data."""
    parts = [(inputs[i::N], targets[i::N]) for i in range(N)]
    task = qg.Task(module, loss, parts, test=(inputs[:8], targets[:8]))
    usual = {"epochs": 3, "batch": len(parts[0][0]), "precision": "fp64"}
    return qg.train(
        task, algorithm="dsgd", topology=f"every:1000/ring:{N}", lr=LR, weight_decay=0.0, **usual | settings
    )


def by_hand(module, loss, inputs, targets, node, steps=3):
    """The same as plain PyTorch does it: one step per epoch with all examples of a node."""
    module = copied(module).double().train()
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(module(inputs[node::N].clone()), targets[node::N]).backward()
        optimizer.step()
    return module


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_frozen_teacher_and_a_temporary_buffer_that_forward_changes_are_each_nodes_own():
    torch.manual_seed(0)
    module, inputs, targets = Teacher(), numbers(20, 6), numbers(20, 6, seed=1)
    run = trained(module, distance, inputs, targets)
    for node in range(N):
        ours, plain = run.model(node), by_hand(module, distance, inputs, targets, node)
        for name, value in [*plain.named_parameters(), *plain.named_buffers()]:
            torch.testing.assert_close(ours.get_parameter(name) if "." in name else ours.mean, value, msg=name)
    assert not run.model(0).teacher.weight.equal(run.model(1).teacher.weight)


def test_a_frozen_teacher_is_in_the_checkpoint(tmp_path):
    """A run that is continued ends as one that was not stopped."""
    torch.manual_seed(0)
    data = (Teacher(), distance, numbers(20, 6), numbers(20, 6, seed=1))
    whole = trained(*data, epochs=4)

    class Stop:
        def on_epoch(self, run):
            if run.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(*data, epochs=4, runs=tmp_path, callbacks=[Stop()], checkpoint_seconds=0)
    again = trained(*data, epochs=4, runs=tmp_path)
    for name, value in whole.model(2).state_dict().items():
        assert again.model(2).state_dict()[name].equal(value), name


class CountingLoss(nn.Module):
    """Keeps the mean of the outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output, target):
        self.mean.lerp_(output.detach().mean().to(self.mean.dtype), 0.5)
        return functional.cross_entropy(output - self.mean, target)


def test_a_loss_that_changes_its_own_state_is_refused():
    with pytest.raises(qg.InputError, match="CountingLoss changes its own mean, which the nodes would share"):
        trained(Layers(), CountingLoss(), numbers(20, 6), torch.arange(20) % 5)


def test_a_network_that_writes_into_its_inputs_is_tested_on_the_same_inputs_by_every_node():
    torch.manual_seed(0)
    module, inputs, targets = NormalisesInPlace(), numbers(20, 6), torch.arange(20) % 5
    run = trained(module, functional.cross_entropy, inputs, targets)
    for node in range(N):
        model = run.model(node).double().eval()
        expected = functional.cross_entropy(model(inputs[:8].clone()), targets[:8])
        assert run.records[-1]["test_loss_nodes"][node] == pytest.approx(float(expected.detach()), rel=1e-9)


def test_complex_parameters_and_buffers_keep_their_imaginary_parts():
    torch.manual_seed(0)
    module, inputs, targets = Fourier(), numbers(20, 1, 16), numbers(20, 1, 16, seed=1)
    run = trained(module, functional.mse_loss, inputs, targets)
    plain = by_hand(_double(module), functional.mse_loss, inputs, targets, 1)
    torch.testing.assert_close(run.model(1).weight.to(torch.complex128), plain.weight.detach())
    ids = torch.arange(160).view(20, 8) % 13

    def loss(output, target):
        return functional.cross_entropy(output.transpose(1, 2), target)

    rotary = Rotary()
    model = trained(rotary, loss, ids, ids.roll(1)).model(1)
    assert model.turns.is_complex()
    torch.testing.assert_close(model.query.weight, by_hand(_double(rotary), loss, ids, ids.roll(1), 1).query.weight)


def _double(module):
    """In double precision; `nn.Module.double` leaves complex tensors alone."""
    return copy.deepcopy(module)._apply(
        lambda value: value.to(torch.complex128) if value.is_complex() else value.double()
    )


def test_weights_that_the_network_writes_itself_are_kept():
    """An embedding with `max_norm` writes into its weights in the forward pass."""
    torch.manual_seed(0)
    module, ids, targets = Embeddings(max_norm=1.0), torch.arange(160).view(20, 8) % 13, torch.arange(20) % 5
    run = trained(module, functional.cross_entropy, ids, targets)
    plain = by_hand(module, functional.cross_entropy, ids, targets, 2)
    torch.testing.assert_close(run.model(2).embedding.weight, plain.embedding.weight)


class Distribution(Layers):
    """Checks of `torch.distributions` read values, which a trace does not record."""

    def forward(self, x):
        mean = super().forward(x)
        return mean + 0 * torch.distributions.Normal(mean, 1.0).log_prob(mean)


def test_a_network_that_cannot_be_traced_stays_vectorised(monkeypatch, caplog):
    monkeypatch.setattr("quasiglobal.stacked.routes.CALLS_BEFORE_TRACING", 2)
    run = trained(Distribution(), functional.cross_entropy, numbers(20, 6), torch.arange(20) % 5, epochs=5)
    assert run.status == "finished"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) <= 1
    assert all(line.startswith("Distribution is trained by vmap, untraced, which is slower: ") for line in said)


class Listed(Layers):
    """Keeps its parameters in a list too."""

    def __init__(self):
        super().__init__()
        self.listed = [self.first.weight, self.head.bias]

    def forward(self, x):
        return super().forward(x) + (self.listed[0].square().sum() + self.listed[1].sum())


class ClippedData(Layers):
    """Clips its weights through `.data`, as in a Wasserstein GAN."""

    def forward(self, x):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClippedLater(Layers):
    """An embedding of small norm, after a layer that has been used: writes into one weight, not into others."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 5, max_norm=0.3)

    def forward(self, x):
        return super().forward(x) @ self.embedding(torch.arange(5, device=x.device))


class Shrinking(Layers):
    """Shrinks its weights in each step: what a failed attempt wrote must not count."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        return super().forward(x)


def halve(parameter):
    parameter.grad.mul_(0.5)


class AfterAccumulation(Layers):
    """A hook that runs once the gradient of a parameter is complete."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(halve)


class Cached(Layers):
    """Computes a constant at its first call."""

    offset = None

    def forward(self, x):
        if self.offset is None:
            self.offset = torch.linspace(0, 1, x.shape[-1]).to(x)
        return super().forward(x + self.offset)


class UsedTwice(Layers):
    """A part with three names."""

    def __init__(self):
        super().__init__()
        self.square = nn.Linear(6, 6)
        self.parts = nn.ModuleList([self.square, nn.Sequential(self.square, nn.Tanh())])

    def forward(self, x):
        return super().forward(self.parts[1](self.parts[0](self.square(x))))


class Adapted(Layers):
    """Takes a step on its own head, by the gradient in the forward pass, also in a test."""

    def forward(self, x):
        y = torch.tanh(self.first(x))
        (g,) = torch.autograd.grad(self.head(y).square().sum(), self.head.weight, create_graph=True)
        return y @ (self.head.weight - 0.1 * g).T


class Student(Teacher):
    """The teacher starts with the student's weights, and has no temporary buffer."""

    def __init__(self):
        super().__init__()
        self.teacher.load_state_dict(self.student.state_dict())


UNUSUAL = {made.__name__: made for made in (
    Listed, ClippedData, ClippedLater, Shrinking, AfterAccumulation, Cached, UsedTwice, Adapted, Student
)}


@pytest.mark.parametrize("name", UNUSUAL)
def test_each_node_trains_as_plain_pytorch_does(name):
    torch.manual_seed(0)
    module, inputs, targets, loss = UNUSUAL[name](), numbers(20, 6), torch.arange(20) % 5, functional.cross_entropy
    if name == "Student":
        targets, loss = numbers(20, 6, seed=1), distance
    run = trained(module, loss, inputs, targets)
    torch.manual_seed(0)
    for node in range(N):
        plain = by_hand(copied(module), loss, inputs, targets, node)
        expected = plain.state_dict() | dict(plain.named_buffers())
        for key, value in run.model(node).state_dict().items():
            torch.testing.assert_close(value, expected[key].detach(), msg=f"{name}.{key}")


class Remembering(Layers):
    """Keeps its last activation in an attribute, and uses it in the next call."""

    last = 0.0

    def forward(self, x):
        y = torch.tanh(self.first(x)) + self.last
        self.last = 0.1 * y.detach().mean(0)
        return self.head(y)


def test_a_tensor_that_is_kept_in_an_attribute_is_each_nodes_own():
    module, data = Remembering(), (functional.cross_entropy, numbers(20, 6), torch.arange(20) % 5)
    run = trained(module, *data)
    for node in range(N):
        for key, value in by_hand(module, *data, node).state_dict().items():
            torch.testing.assert_close(run.model(node).state_dict()[key], value, msg=key)


class Locked(Layers):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_is_made_by_a_function():
    data = functional.cross_entropy, numbers(20, 6), torch.arange(20) % 5
    with pytest.raises(qg.InputError, match=r"Locked cannot be copied: .* give a function that makes a new one"):
        trained(Locked(), *data)
    assert trained(Locked, *data).status == "finished"


class Counting(Layers):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_counter_that_all_nodes_share_is_warned_of():
    module = Counting()
    module.calls = 0
    with pytest.warns(UserWarning, match="Counting changes its attribute calls in each call, and all nodes share it"):
        trained(module, functional.cross_entropy, numbers(20, 6), torch.arange(20) % 5)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_complex_layers_keep_their_imaginary_parts_in_bf16():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.layer = nn.Dropout(1e-9), nn.Linear(6, 5, dtype=torch.complex64)

        def forward(self, x):
            return self.layer(torch.complex(self.drop(x), x.flip(1))).abs()

    torch.manual_seed(0)
    module = Turned()
    run = trained(module, functional.cross_entropy, numbers(20, 6).float(), torch.arange(20) % 5, precision="bf16")
    moved = run.model(1).layer.weight.detach() - module.layer.weight.detach()
    assert moved.imag.norm() > 0.1 * moved.real.norm() > 1e-4


@pytest.mark.parametrize("inplace", [False, True])
def test_random_slopes_are_each_nodes_own(inplace, caplog):
    module = nn.Sequential(nn.Linear(6, 6), nn.RReLU(0.1, 0.9, inplace=inplace), nn.Linear(6, 5))
    inputs, targets = numbers(5, 6).repeat_interleave(N, dim=0), torch.arange(5).repeat_interleave(N)
    run = trained(module, functional.cross_entropy, inputs, targets)
    assert not [record for record in caplog.records if record.name == "quasiglobal"], "computed for all at once"
    weights = [run.model(node)[0].weight for node in range(N)]
    assert not any(weights[0].equal(other) for other in weights[1:])
    with torch.no_grad():
        slopes = run.model(0)[1](-torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(slopes, torch.full((3,), -0.5, dtype=torch.float64))


def test_complex_numbers_are_saved_and_loaded(tmp_path):
    class Turning(Fourier):
        def __init__(self):
            super().__init__()
            self.register_buffer("turn", torch.tensor(1j, dtype=torch.complex64))

        def forward(self, x):
            return super().forward(x) + (self.turn * self.turn.conj()).real

    torch.manual_seed(0)
    data = (Turning(), functional.mse_loss, numbers(20, 1, 16), numbers(20, 1, 16, seed=1))
    run = trained(*data, runs=tmp_path, seeds=2)
    again = trained(*data, runs=tmp_path, seeds=2)
    for model in (again.model(1), again.average()):
        assert model.weight.dtype == model.turn.dtype == torch.complex128
        assert model.turn == 1j
    assert again.model(1).weight.equal(run.model(1).weight)
