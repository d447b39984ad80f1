"""Your own model, loss and data in memory: `qg.train`."""

import signal
from dataclasses import replace

import pytest
import torch
from small_runs import CPU, SHORT, run_all, settled
from torch import nn

import quasiglobal as qg
from quasiglobal.data.sources import Dataset, Examples, load
from quasiglobal.errors import InputError
from quasiglobal.models import build
from quasiglobal.runs.building import make_task
from quasiglobal.runs.local import simulate
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program
from quasiglobal.training.task import BOUND_EXAMPLES, Task


def test_your_own_module_trains():
    data = load("digits")
    task = qg.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.functional.cross_entropy, data)
    run = qg.train(task, algorithm="qg-dsgdm-n", topology="ring:4", epochs=4, lr=0.05, alpha=10.0)
    assert run.records[-1]["accuracy"] > 0.8
    model = run.model(2)
    with torch.no_grad():
        output = model((data.test.x / data.scale - data.mean[0]) / data.std[0])
    accuracy = (output.argmax(dim=1) == data.test.y).double().mean()
    assert run.records[-1]["accuracy_worst"] - 1e-6 <= accuracy <= run.records[-1]["accuracy_best"] + 1e-6


def test_the_test_loss_is_the_tasks_own():
    def hundredfold(output, target):
        return 100 * nn.functional.cross_entropy(output, target)

    module, data = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits")
    plain, scaled = (
        qg.train(qg.Task(module, loss, data), algorithm="dsgd", topology="ring:4", epochs=1, lr=lr, partition="iid")
        for loss, lr in ((nn.functional.cross_entropy, 0.5), (hundredfold, 0.005))
    )
    assert scaled.records[-1]["test_loss"] == pytest.approx(100 * plain.records[-1]["test_loss"], rel=1e-3)
    assert scaled.records[-1]["loss"] == pytest.approx(100 * plain.records[-1]["loss"], rel=1e-3)


def test_from_python_the_learning_rate_is_constant_unless_a_schedule_is_asked_for():
    def rates(**settings):
        task = qg.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.functional.cross_entropy, load("digits"))
        settings = {"lr": 0.5, "batch": 512} | settings
        run = qg.train(task, algorithm="dsgd", topology="ring:4", epochs=4, **settings)
        return [record["lr"] for record in run.records]

    assert rates() == [0.5] * 4
    assert rates(milestones=(0.5,)) == pytest.approx([0.5, 0.5, 0.05, 0.05])
    assert rates(milestones=(0.5,), decay=0.5) == pytest.approx([0.5, 0.5, 0.25, 0.25])
    assert rates(warmup=2.0) == pytest.approx([0.1, 0.3, 0.5, 0.5])
    assert rates(warmup=2.0, milestones=(0.5, 0.75)) == pytest.approx([0.1, 0.3, 0.05, 0.005])
    assert rates(warmup=2.0, schedule="steps") == pytest.approx([0.1, 0.3, 0.05, 0.005])
    first, second, *_ = rates(warmup=2.0, lr=None, batch=8)
    assert first < second < 0.05, "the default rate is 0.05 here"
    assert rates(recipe="cifar10", warmup=2.0) == pytest.approx([0.1, 0.3, 0.05, 0.005])
    assert rates(lr=lambda t: 1 / t) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    with pytest.raises(InputError, match="decay has no effect without milestones"):
        rates(decay=0.5)
    with pytest.raises(InputError, match="lr is a function of the step; leave out schedule, warmup"):
        rates(lr=lambda t: 0.1, warmup=2.0)
    with pytest.raises(InputError, match=r"lr\(3\) must be > 0 and finite, got 0.0"):
        rates(lr=lambda t: 0.1 if t < 3 else 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_return_the_models_trained_so_far(number):
    task = qg.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.functional.cross_entropy, load("digits"))

    def interrupt(record):
        if record["epoch"] == 2:
            signal.raise_signal(number)

    with pytest.warns(UserWarning, match="stopped by Ctrl-C after epoch 2 of 50"):
        run = qg.train(task, algorithm="dsgd", topology="ring:4", epochs=50, lr=0.1, watch=interrupt, device="cpu")
    assert len(run.records) == 2
    assert run.model() is not None


def test_your_own_dropout_is_drawn_anew_each_step_and_again_on_resume():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    task = qg.Task(module, nn.functional.cross_entropy, load("digits"))
    plain = qg.Task(nn.Sequential(module[0], nn.Identity(), module[2]), nn.functional.cross_entropy, load("digits"))
    whole, _ = run_all(SHORT, task=task)
    first, second = (Program(task, [SHORT], CPU) for _ in range(2))
    first.train_epoch()
    second.restore([first.checkpoint(0)])
    Loop(second).run()
    assert second.state.x.equal(whole.state.x)
    assert not whole.state.x.isclose(run_all(SHORT, task=plain)[0].state.x).all()


def test_your_own_data_by_arrays():
    x, y = torch.randn(80, 5), torch.randint(0, 3, (80,))
    data = Dataset("mine", Examples(x, y), Examples(x[:20], y[:20]), ("a", "b", "c"), 1.0, (0.0,), (1.0,), "none")
    task = Task(nn.Linear(5, 3), nn.functional.cross_entropy, data)
    run = qg.train(task, algorithm="dsgd", topology="complete:2", epochs=2, lr=0.1, partition="iid", batch=8)
    assert len(run.records) == 2


def test_models_by_their_path(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\ndef Small():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = replace(SHORT, model="mynets:Small")
    assert make_task(experiment, load("digits")).module(0)[1].out_features == 10
    assert build("mlp", shape=(1, 8, 8)) is not None


def test_a_model_of_ones_own_is_left_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n"
        "net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = replace(SHORT, model="own_network:net", epochs=1)
    simulate(experiment, settled(tmp_path / "runs"))
    from own_network import net

    assert net[2].num_batches_tracked == 0


def test_the_bound_of_losses_that_diverge_needs_no_more_examples_than_a_small_run_has_in_a_step():
    """However many examples there are: the forward pass keeps what its gradients need."""
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    x = torch.randn(700, 3)
    task = qg.Task(Watched(3, 1), nn.functional.mse_loss, (x, 10 * x[:, :1]), test=(x[:8], x[:8, :1]))
    assert task.large_loss > 1e4
    assert max(seen) == BOUND_EXAMPLES == 16
