"""Networks that keep a state of their own, or do something unusual, trained by `qg.train` (`zoo_habits.py`)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo_habits import Embeddings, Fourier, Layers, NormalisesInPlace, Rotary, Teacher, distance

import quasiglobal as qg

N, BATCH, LR = 4, 5, 0.1


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
    module = copy.deepcopy(module).double().train()
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
    monkeypatch.setattr("quasiglobal.gradients.routes.CALLS_BEFORE_TRACING", 2)
    run = trained(Distribution(), functional.cross_entropy, numbers(20, 6), torch.arange(20) % 5, epochs=5)
    assert run.status == "finished"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) <= 1
    assert all(line.startswith("Distribution is trained by vmap, untraced, which is slower: ") for line in said)
