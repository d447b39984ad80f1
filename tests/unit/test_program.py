"""A program of many models: correct steps and correct evaluation."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import CPU, SHORT, run_all, seeded
from torch import nn

from quasiglobal.data.sources import load
from quasiglobal.runs.building import make_task
from quasiglobal.stacked.compiling import Fused
from quasiglobal.stacked.kernels.network import Kernels
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program
from quasiglobal.training.rows import state_dict_of


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_a_single_node_is_a_plain_pytorch_loop(model):
    experiment = replace(
        SHORT, model=model, topology="complete:1", partition="iid", algorithm="dsgdm-n", precision="fp64", epochs=3,
        milestones=(0.5,), weight_decay=1e-3,
    )
    task = make_task(experiment, load("digits"))
    program, _ = run_all(experiment, task=task)
    module = task.module(0).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-3)
    data = task.data
    steps = 0
    for epoch in range(3):
        draws = program.feed.plan.epoch(epoch, CPU)
        for step, size in enumerate(program.feed.plan.sizes):
            steps += 1
            optimizer.param_groups[0]["lr"] = program.feed.schedules[0](steps)
            index = draws.index[step, 0, :size]
            x = (data.train.x[index].double() / data.scale - data.mean[0]) / data.std[0]
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), data.train.y[index]).backward()
            optimizer.step()
    assert steps > 50
    expected = program.layout.row(dict(module.named_parameters()))
    assert (program.state.x[0] - expected).norm() <= 1e-10 * expected.norm()


def test_seeds_as_rows_equal_seeds_alone():
    together, records = run_all(replace(SHORT, precision="fp64"), seeds=(0, 1))
    for k, seed in enumerate((0, 1)):
        alone, alone_records = run_all(replace(SHORT, precision="fp64"), seeds=(seed,))
        torch.testing.assert_close(together.state.x[4 * k : 4 * k + 4], alone.state.x, rtol=0, atol=1e-10)
        assert records[-1][k]["accuracy"] == alone_records[-1][0]["accuracy"]


@pytest.mark.slow
def test_steps_that_write_into_their_storage_are_the_same():
    """Captured steps on a GPU write in place too."""
    names = (
        "qg-dsgdm-n:tau=2", "slowmo:tau=3", "mimelite", "dmsgd", "d2+", "dsgdm-n-gt", "lt-admm:tau=2",
        "push-diging:sums=true",
    )
    experiments = [
        replace(SHORT, algorithm=name, topology="ring:5", partition="iid", precision="fp64") for name in names
    ]
    task = make_task(experiments[0], load("digits"))
    plain = Program(task, experiments, CPU)
    program = Program(task, experiments, CPU, capture=lambda: lambda key, step: step(), model=plain.model)
    storage = program.state.x.data_ptr()
    for one in (plain, program):
        Loop(one).run()
    assert program.state.x.data_ptr() == storage
    for k, name in enumerate(names):
        ours, theirs = program.rows_of(k), plain.rows_of(k)
        assert all(ours[tensor].equal(value) for tensor, value in theirs.items()), name


def test_everybody_starts_from_the_same_weights_and_seeds_differ():
    program = Program(make_task(SHORT, load("digits")), seeded(SHORT, (0, 1)), CPU)
    rows = program.state.x.view(2, 4, -1)
    assert (rows == rows[:, :1]).all()
    assert not rows[0].equal(rows[1])


def test_fedbn_keeps_batch_norm_at_the_node():
    experiment = replace(SHORT, model="cnn", norm="bn", algorithm="dsgd", epochs=1)
    shared, _ = run_all(replace(experiment, topology="complete:4"))
    local, _ = run_all(replace(experiment, topology="complete:4", bn="local"))
    assert local.layout.shared < local.layout.size == shared.layout.shared
    assert local.state.x[:, : local.layout.shared].std(dim=0).max() < 1e-5, "the other parameters are averaged"
    assert local.state.x[:, local.layout.shared :].std(dim=0).max() > 1e-4, "batch norm is not averaged"
    assert shared.state.x.std(dim=0).max() < 1e-5


@pytest.mark.parametrize("algorithm", ["mimelite:tau=3", "slowmo:tau=4", "d2+", "qg-dadam", "dsgdm-n-gt"])
def test_every_kind_of_algorithm_trains(algorithm):
    experiment = replace(SHORT, algorithm=algorithm, topology="lazy/ring:4", lr=0.01)
    _, records = run_all(experiment)
    assert records[-1][0]["loss"] < records[0][0]["loss"]


@pytest.mark.parametrize("norm", ["evonorm-released", "bn"])
def test_a_score_is_each_models_own_in_test_order(norm):
    experiment = replace(SHORT, model="cnn", norm=norm, epochs=1)
    program, records = run_all(experiment)
    data = program.task.data
    x = (data.test.x / data.scale - data.mean[0]) / data.std[0]
    accuracies = []
    for i in range(4):
        module = program.task.module(0)
        module.load_state_dict(state_dict_of(program.rows_of(0), program.layout, i))
        module.eval()
        with torch.no_grad():
            outputs = torch.cat([module(batch) for batch in x.split(32)])
        accuracies.append(float((outputs.argmax(dim=1) == data.test.y).float().mean()))
    assert records[-1][0]["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert records[-1][0]["accuracy_worst"] == pytest.approx(min(accuracies), abs=1e-6)


def test_shared_draws_are_the_same_at_every_node():
    one = replace(SHORT, partition="iid", augment=True)
    for draws in ("own", "shared"):
        program, _ = run_all(replace(one, draws=draws, epochs=1))
        epoch = program.feed.plan.epoch(0, torch.device("cpu"))
        places = [
            [np.flatnonzero(owner.examples == row)[0] for row in epoch.index[0, k].tolist()]
            for k, owner in enumerate(program.feed.plan.owners)
        ]
        assert all(of == places[0] for of in places) == (draws == "shared")
    assert replace(one, draws="shared").hash != one.hash == replace(one, draws="own").hash


def test_bytes_sent_count_neighbours_and_exact_means():
    sent = {
        name: run_all(replace(SHORT, algorithm=name, epochs=1))[1][-1][0]["bytes_sent"]
        for name in ("dsgd", "dsgd-gt", "sgd")
    }
    steps, d = 6, 26_122
    assert sent["dsgd"] == steps * 2 * 4 * d                  # two neighbours, float32
    assert sent["dsgd-gt"] == 2 * sent["dsgd"]
    assert sent["sgd"] == steps * 2 * 3 / 4 * 4 * d           # a ring all-reduce over four nodes


def test_compiled_parts_of_a_step_compute_the_same(monkeypatch):
    """Augmentation and loss, which long trainings on a GPU compile; here they are traced."""
    monkeypatch.setattr("quasiglobal.stacked.compiling.by_inductor", lambda program: program)
    monkeypatch.setattr("quasiglobal.stacked.kernels.network.triton_runs", lambda x: False)
    one = replace(SHORT, model="cnn", topology="ring:3", partition="iid", epochs=1, steps=3, precision="fp64")
    task, ends = make_task(one, load("digits")), []
    for fuses in (False, True):
        program = Program(task, [one], CPU)
        program.model.route = Kernels(program.model.route.one)
        program.model.route.fuses = fuses
        if fuses:
            program.feed.show = Fused(program.feed.show)
        program.train_epoch()
        ends.append(program.state.x)
    assert ends[0].equal(ends[1])
    assert program.feed.show.compiles
    assert program.model.route.fused_score.compiles


@pytest.mark.parametrize(("split", "warns"), [("iid", False), ("dirichlet", True), ("shards:2", True)])
def test_adaptive_consensus_warns_on_heterogeneous_data(split, warns):
    experiment = replace(SHORT, algorithm="dsgd-ac", partition=split)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Program(make_task(experiment, load("digits")), [experiment], CPU)
    assert ["data that are alike at all nodes" in str(one.message) for one in caught] == [True] * warns
