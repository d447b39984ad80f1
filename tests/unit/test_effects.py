"""Models and losses that change something besides their result: refused, warned of, or followed."""

import copy
import json
import math
import random
from collections import deque

import numpy as np
import pytest
import torch
from test_habits import by_hand, numbers, trained
from torch import nn
from torch.nn import functional
from zoo_habits import Layers

import quasiglobal as qg
from quasiglobal.models import build
from quasiglobal.stacked.routes import CALLS_BEFORE_TRACING

LABELS = torch.arange(20) % 5


def train(module, loss=functional.cross_entropy, targets=LABELS, **settings):
    return trained(module, loss, numbers(20, 6), targets, **settings)


class Auxiliary(Layers):
    """Keeps a part of the loss in an attribute."""

    penalty = 0.0

    def forward(self, x):
        y = self.first(x)
        self.penalty = y.square().mean()
        return self.head(torch.tanh(y))

    def loss(self, output, target):
        return functional.cross_entropy(output, target) + self.penalty


class Centred(Layers):
    """A loss that reads a buffer of the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.centre.lerp_(y.detach().mean(0), 0.5)
        return y

    def loss(self, output, target):
        return functional.cross_entropy(output - self.centre, target)


class Priced(nn.Module):
    """An object that has the model."""

    def __init__(self, module):
        super().__init__()
        self.module = (module,)

    def forward(self, output, target):
        return functional.cross_entropy(output, target) + self.module[0].first.weight.square().sum()


@pytest.mark.parametrize(("module", "loss_of"), [
    (Auxiliary(), lambda module: module.loss),
    (Auxiliary(), lambda module: lambda output, target: module.loss(output, target)),
    (Centred(), lambda module: module.loss),
    (Layers(), Priced),
])
def test_a_loss_that_reads_the_given_module_is_refused(module, loss_of):
    with pytest.raises(qg.InputError, match="uses values of the module that you gave, but each node trains a copy"):
        train(module, loss_of(module))


def test_a_loss_may_be_a_method_that_reads_constants():
    class Smoothed(Layers):
        smoothing = 0.1

        def loss(self, output, target):
            return functional.cross_entropy(output, target, label_smoothing=self.smoothing)

    module = Smoothed()
    assert train(module, module.loss).status == "finished"


class Remembers(Layers):
    """Keeps tensors in a list, and is trained one model after the other: it branches on a value."""

    def __init__(self):
        super().__init__()
        self.memory = deque(maxlen=3)

    def forward(self, x):
        y = super().forward(x)
        if y.max() > 1e9:
            return y
        result = y - torch.stack(list(self.memory)).mean(0) if self.memory else y
        if self.training:
            self.memory.append(y.detach().mean(0))
        return result


class Logs(Layers):
    """Keeps tensors that it does not use."""

    def __init__(self):
        super().__init__()
        self.seen, self.table = [], None

    def forward(self, x):
        self.table = torch.linspace(0, 1, 6).to(x) if self.table is None else self.table
        self.seen.append(x.detach().mean())
        return super().forward(x + self.table)


def equals_plain_loops(module, loss=functional.cross_entropy, total=3, steps=1, **settings):
    """Train; each node's model is that of a plain loop with a copy of the module and of the loss."""
    run = train(module, copy.deepcopy(loss), epochs=total // steps, steps=steps, **settings)
    for node in range(4):
        plain = by_hand(module, copy.deepcopy(loss), numbers(20, 6), LABELS, node, total)
        for key, value in run.model(node).state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], msg=key)
    return run


def test_a_tensor_that_is_kept_for_the_next_call_is_each_nodes_own():
    equals_plain_loops(Remembers())


def test_a_tensor_that_is_not_used_again_may_be_kept():
    assert train(Logs()).status == "finished"


class Relative:
    """A loss that divides by its moving average."""

    mean = None

    def __call__(self, output, target):
        loss = functional.cross_entropy(output, target)
        self.mean = loss.detach() if self.mean is None else 0.5 * (self.mean + loss.detach())
        return loss / self.mean


class Lagged(Layers):
    """Uses what it kept three calls ago: its first gradients are right on every route."""

    def __init__(self, branches):
        super().__init__()
        self.memory, self.branches = [], branches

    def forward(self, x):
        y = super().forward(x)
        self.memory.append(y.detach().mean(0))
        if len(self.memory) < 4 or (self.branches and y.max() > 1e9):       # which vmap cannot, from the fourth call on
            return y
        return y - self.memory[-4]


@pytest.mark.parametrize("branches", [False, True], ids=["it differs", "it fails"])
def test_the_first_epoch_is_repeated_one_by_one_where_a_faster_route_went_wrong(branches, caplog):
    called = []

    class Note:
        def on_step(self, run):
            called.append(run.step)

    run = equals_plain_loops(Lagged(branches), total=12, steps=6, callbacks=[Note()], eval_every=2)
    assert called == [*range(1, 7), *range(1, 13)]
    assert [record["epoch"] for record in run.records] == [1, 2]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.endswith("as a loop over the models") for line in said] == [True]


def test_a_resumed_run_keeps_the_route(tmp_path, caplog):
    """What the module hides is not in the checkpoint, and is not what decides."""
    def stop(run):
        if run.epoch == 2:
            raise KeyboardInterrupt

    module, how = Lagged(False), {"epochs": 3, "steps": 6, "runs": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        train(module, callbacks=[type("Stop", (), {"on_epoch": staticmethod(stop)})()], checkpoint_seconds=0, **how)
    (note, *_) = sorted(tmp_path.rglob("checkpoint/*.json"))
    assert json.loads(note.read_text())["route"] == "OneByOne"
    caplog.clear()
    assert len(train(module, **how).records) == 3
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "no other route was tried"


class Annealed:
    """A loss with a counter."""

    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return functional.cross_entropy(output, target) * min(1.0, self.calls / 1000)


def test_a_loss_that_keeps_a_tensor_is_each_nodes_own():
    equals_plain_loops(Layers(), Relative())


def test_a_loss_that_counts_is_warned_of_and_followed():
    loss = Annealed()
    loss.calls = 0
    with pytest.warns(UserWarning, match="the loss .* changes its attribute calls in each call"):
        run = train(Layers(), loss, epochs=CALLS_BEFORE_TRACING + 20)
    losses = [record["loss"] for record in run.records]
    assert losses[-1] > losses[CALLS_BEFORE_TRACING + 1] > losses[5], "its factor is not frozen by a trace"


class CountsInADict(Layers):
    """Grows a factor with its calls, and draws random numbers, so that no first gradient is checked."""

    def __init__(self):
        super().__init__()
        self.progress, self.drop = {"steps": 0}, nn.Dropout(0.1)
        self.register_buffer("factor", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.progress["steps"] += 1
            self.factor.fill_(self.progress["steps"])
        return super().forward(self.drop(x))


@pytest.mark.filterwarnings("ignore:CountsInADict changes its attribute progress in each call")
def test_a_counter_in_a_dict_is_followed():
    steps = CALLS_BEFORE_TRACING + 20
    assert float(train(CountsInADict(), epochs=steps).model(0).factor) >= steps


class EndsLater(Layers):
    """Gives zeros after some steps."""

    steps = 0

    def forward(self, x):
        self.steps = self.steps + self.training
        return super().forward(x) * (self.steps < CALLS_BEFORE_TRACING + 10)


@pytest.mark.filterwarnings("ignore:EndsLater changes its attribute")
def test_a_branch_on_a_counter_is_not_frozen():
    """A trace would have the first branch alone."""
    module, steps = EndsLater(), CALLS_BEFORE_TRACING + 20
    module.steps = 0
    ended = [abs(record["loss"] - math.log(5)) < 1e-12 for record in train(module, epochs=steps).records]
    assert ended.index(True) > CALLS_BEFORE_TRACING
    assert all(ended[ended.index(True):])


class OwnGenerator(Layers):
    def __init__(self, generator):
        super().__init__()
        self.generator, self.drop = generator, nn.Dropout(0.1)
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.drawn.fill_(self.generator.random())
        return super().forward(self.drop(x))


@pytest.mark.parametrize("generator", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0)])
def test_each_node_draws_from_a_generator_of_the_model(generator):
    with pytest.warns(UserWarning, match="OwnGenerator draws from its own generator generator, which all nodes share"):
        run = train(OwnGenerator(generator))
    assert len({float(run.model(node).drawn) for node in range(4)}) == 4


def test_a_step_whose_loss_draws_from_numpy_is_not_captured_with_the_librarys_models_either():
    def noisy(output, target):
        return functional.cross_entropy(output, target) * float(np.random.rand() + 0.5)

    data = torch.zeros(8, 1, 8, 8), torch.arange(8) % 2
    model = build("mlp", classes=2, shape=(1, 8, 8))
    assert qg.Task(model, noisy, data).effects.in_python
    assert not qg.Task(model, functional.cross_entropy, data).effects.in_python


class DrawsLater(Layers):
    """Draws random numbers from its third step on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.calls += 1
        scale = torch.rand(()) + random.random() if self.calls > 2 else 1.0
        return super().forward(x) * scale


def test_the_seed_repeats_numbers_that_are_drawn_in_later_steps():
    torch.manual_seed(0)
    module = DrawsLater()
    first = train(module, epochs=6)
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate()
    second = train(module, epochs=6)
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    other = train(module, epochs=6, seed=1)
    losses = [[record["loss"] for record in run.records] for run in (first, second, other)]
    assert losses[0] == losses[1]
    assert abs(losses[0][-1] - losses[2][-1]) > 1e-3, "another seed draws other numbers"


class Synchronised(Layers):
    """A target network that gets the weights of the other at every second step."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(6, 5).requires_grad_(False)
        self.online = nn.Linear(6, 5)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
            if self.steps % 2 == 0:
                self.target.load_state_dict(self.online.state_dict())
        return self.online(x) + self.target(torch.tanh(x))


class Unfreezes(Layers):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.first.requires_grad_(bool(self.steps > 1))
        return super().forward(x)


class Transposed(nn.Module):
    """Weights that are tied by their memory."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)
        self.second.weight = nn.Parameter(self.first.weight.t())

    def forward(self, x):
        return self.first(self.second(self.first(x)))


@pytest.mark.parametrize(("made", "sentence"), [
    (Synchronised, "Synchronised changes its frozen target.weight in training, but not in its first step"),
    (Unfreezes, "Unfreezes unfreezes its first.weight in training"),
    (Transposed, r"(first|second).weight and (first|second).weight of Transposed share memory"),
])
def test_what_the_nodes_would_share_is_refused(made, sentence):
    with pytest.raises(qg.InputError, match=sentence):
        train(made())


class AdapterOnly(Layers):
    """Saves a part of its weights."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def state_dict(self, *args, **named):
        return {key: value for key, value in super().state_dict(*args, **named).items() if "head" in key}


def test_a_module_may_have_a_state_dict_of_its_own(tmp_path):
    module = AdapterOnly()
    for _ in range(2):                                      # trained, and loaded
        model = train(module, runs=tmp_path).model(1)
        assert model.first.weight.equal(module.first.weight.double())
        assert not model.head.weight.equal(module.head.weight.double())


class Pairs(nn.Module):
    """All similarities of the examples of a batch."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.one(x) @ self.other(x.roll(1, 1)).T


def test_outputs_may_depend_on_the_size_of_the_batch():
    def loss(output, target):
        return functional.cross_entropy(output, torch.arange(len(output), device=output.device))

    inputs = numbers(700, 6).float()
    task = qg.Task(Pairs(), loss, (inputs, torch.zeros(700)), test=(inputs, torch.zeros(700)))
    run = qg.train(task, topology="ring:4", epochs=1, batch=20, lr=0.1)
    model = run.model(0)
    with torch.no_grad():
        expected = sum(len(part) * loss(model(part), None) for part in inputs.split(500)) / 700
    assert run.records[-1]["test_loss_nodes"][0] == pytest.approx(float(expected), rel=1e-5)


class Inspected(nn.Module):
    """Parts that share a list, which the model reads in the same call; and an assigned buffer, a counter, a table."""

    class Part(nn.Linear):
        def __init__(self, store):
            super().__init__(6, 6)
            self.store = store

        def forward(self, x):
            y = super().forward(x)
            self.store.append(y)
            return y

    def __init__(self):
        super().__init__()
        self.store, self.seen, self.length = [], None, 0
        self.parts = nn.ModuleList([self.Part(self.store), self.Part(self.store)])
        self.head = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, x):
        self.store.clear()
        self.length = x.shape[1]
        if len(self.table) < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype, device=x.device)
        for part in self.parts:
            x = torch.tanh(part(x)) + self.table
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y = self.head(torch.stack(self.store).mean(0) + x - self.mean)
        self.seen = y.detach()
        if not self.training:
            self.cache.copy_(self.seen.mean(0))
        return y


class Initialised(Layers):
    """Sets a buffer by its first batch, as ActNorm does, and remembers that in a flag."""

    def __init__(self, branches):
        super().__init__()
        self.ready, self.branches = False, branches
        self.register_buffer("location", torch.zeros(6))

    def forward(self, x):
        if self.training and not self.ready:
            self.location.copy_(x.mean(0))
            self.ready = True
        if self.branches and x.max() > 1e9:
            return super().forward(x)
        return super().forward(x - self.location)


@pytest.mark.filterwarnings("error::UserWarning")
def test_harmless_effects_are_allowed(tmp_path):
    torch.manual_seed(0)
    module = Inspected()
    model = train(module, runs=tmp_path).model(1)
    expected = by_hand(module, functional.cross_entropy, numbers(20, 6), LABELS, 1)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value.detach(), msg=key)
    again = train(module, runs=tmp_path, epochs=5).model(1)         # resumed
    torch.testing.assert_close(again.mean, by_hand(module, functional.cross_entropy, numbers(20, 6), LABELS, 1, 5).mean)


@pytest.mark.parametrize("branches", [False, True], ids=["together", "one by one"])
def test_each_node_does_what_is_done_once(branches):
    run, inputs = train(Initialised(branches)), numbers(20, 6)
    for node in range(4):
        torch.testing.assert_close(run.model(node).location, inputs[node::4].mean(0))


@pytest.mark.filterwarnings("ignore:Steps changes its attribute steps in each call")
@pytest.mark.parametrize("branches", [False, True], ids=["together", "one by one"])
def test_a_counter_counts_steps(branches):
    class Steps(Initialised):
        def __init__(self):
            super().__init__(branches)
            self.steps = 0
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x):
            self.steps += self.training
            self.seen.fill_(self.steps)
            return super().forward(x)

    run = train(Steps(), epochs=7)
    assert [int(run.model(node).seen) for node in range(4)] == [7] * 4


class Unusual(Layers):
    """Interleaved views of one matrix, a scripted part, a generator without a state, small positive weights."""

    def __init__(self):
        super().__init__()
        whole = 0.1 * torch.randn(6, 12)
        self.one, self.other = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])
        self.scale = nn.Parameter(torch.full((6,), 5e-4))
        self.generator, self.nothing = random.SystemRandom(), float("nan")
        self.part = torch.jit.script(nn.BatchNorm1d(6))

    def forward(self, x):
        return super().forward(self.part(x @ self.one + x @ self.other) + x * self.scale.abs().sqrt())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_unusual_attributes_are_allowed():
    assert train(Unusual).status == "finished"


def test_a_loss_may_refer_to_a_variable_that_is_set_later():
    def loss(output, target):
        return functional.cross_entropy(output, target) if len(output) else run.status

    run = train(Layers(), loss)
    assert run.status == "finished"


class Endless(Layers):
    """A list that has itself, and a loss that cannot be compared."""

    def __init__(self):
        super().__init__()
        self.entries = [1]
        self.entries.append(self.entries)


class Incomparable:
    def __eq__(self, other):
        raise TypeError

    __hash__ = None

    def __call__(self, output, target):
        return functional.cross_entropy(output, target)


def test_what_cannot_be_searched_or_compared_is_allowed():
    assert train(Endless(), Incomparable()).status == "finished"
