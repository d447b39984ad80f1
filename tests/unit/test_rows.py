"""Runs as rows of one program."""

import signal
from dataclasses import replace

import pytest
import torch
from small_runs import CPU, SHORT, final, only_runs_together, settled

import quasiglobal as qg
from quasiglobal.data.sources import load
from quasiglobal.runs.building import make_task
from quasiglobal.runs.callbacks import utilisation
from quasiglobal.runs.local import simulate
from quasiglobal.runs.store import RunFolder
from quasiglobal.training.program import Program


@pytest.mark.parametrize("algorithm", [
    "qg-dsgdm-n", "slowmo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("d2+", "qg-dadam"))
])
def test_learning_rates_and_partitions_are_rows_too(tmp_path, algorithm):
    common = replace(SHORT, algorithm=algorithm, topology="lazy/ring:4", precision="fp64", warmup=0.0, epochs=2)
    settings = [common, replace(common, lr=0.01), replace(common, lr=0.02, alpha=10.0), replace(common, milestones=())]
    rows = simulate(settings, settled(tmp_path / "rows"))
    alone = [run for one in settings for run in simulate(one, settled(tmp_path / "alone"))]
    for one, other in zip(rows, alone, strict=True):
        assert one.experiment == other.experiment
        found = final(one)
        for name, value in final(other).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
        assert one.summary.partition == other.summary.partition


@pytest.mark.slow
def test_algorithms_and_topologies_share_the_gradients_and_step_on_their_own_rows(tmp_path):
    common = replace(SHORT, precision="fp64", warmup=0.0, epochs=2)
    names = ["qg-dsgdm-n", "d2+", "mimelite", "sgdm-n", "slowmo:tau=3", "dmsgd"]
    settings = [replace(common, algorithm=name, topology="lazy/ring:4") for name in names]
    settings += [replace(common, topology=name) for name in ("one-peer-exponential:4", "complete:4")]
    programs = []
    rows = simulate(settings, settled(tmp_path / "rows", seeds=2), lambda runs, records: programs.append(len(runs)))
    assert set(programs) == {2 * len(settings)}, "all runs share one program"
    assert [run.experiment.algorithm for run in rows[::2]] == [one.algorithm for one in settings], "requested order"
    alone = [run for one in settings for run in simulate(one, settled(tmp_path / "alone", seeds=2))]
    for one, other in zip(rows, alone, strict=True):
        assert one.experiment == other.experiment
        found = final(one)
        for name, value in final(other).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
        assert one.records()[-1]["bytes_sent"] == other.records()[-1]["bytes_sent"]


def test_runs_that_cannot_share_a_program_train_one_after_the_other(tmp_path, monkeypatch):
    common = replace(SHORT, epochs=1)
    settings = [common, replace(common, batch=32), replace(common, topology="ring:3"), replace(common, alpha=10.0)]
    programs = []

    def watch(runs, records):
        programs.append(len(runs))

    runs = simulate([*settings, common], settled(tmp_path / "a"), watch)
    assert programs == [2, 1, 1]
    assert [run.experiment for run in runs] == [*settings, common]
    monkeypatch.setattr("quasiglobal.runs.local.runs_that_fit", lambda *_, **how: 2)
    simulate(common, settled(tmp_path / "b", seeds=5), watch)
    assert programs[3:] == [2, 2, 1], "as many at a time as fit in memory"
    with pytest.raises(qg.InputError, match="runs that train together need one batch, got 64 and 32"):
        Program(make_task(common, load("digits")), settings[:2], CPU)


@pytest.mark.parametrize("epoch", [0, 1])
def test_runs_that_do_not_fit_the_memory_together_continue_as_smaller_groups(tmp_path, monkeypatch, caplog, epoch):
    common = replace(SHORT, precision="fp64", epochs=2)
    whole = simulate(common, settled(tmp_path / "whole", seeds=5))
    sizes = only_runs_together(monkeypatch, 2, epoch)
    split = simulate(common, settled(tmp_path / "split", seeds=5))
    assert list(dict.fromkeys(sizes)) == [5, 3, 2, 1]
    for runs, fewer in ((5, 3), (3, 2)):
        assert caplog.text.count(f"{runs} runs together do not fit the memory: {fewer} at a time") == 1
    for one, other in zip(split, whole, strict=True):
        assert [record["epoch"] for record in one.records()] == [1, 2]
        torch.testing.assert_close(final(one)["x"], final(other)["x"], rtol=1e-9, atol=1e-9)


def test_a_run_that_does_not_fit_the_memory_is_one_sentence(tmp_path, monkeypatch):
    only_runs_together(monkeypatch, 0)
    with pytest.raises(qg.InputError, match="4 models mlp with batch 64 do not fit the memory; use a smaller --batch"):
        simulate(SHORT, settled(tmp_path))


@pytest.mark.parametrize("rate", [0.1, 1e30])
def test_a_stop_in_the_last_epoch_of_a_program_keeps_the_next_from_beginning(tmp_path, rate):
    first, second = replace(SHORT, lr=rate), replace(SHORT, batch=16)

    def stop(runs, records):
        if records[0]["epoch"] == SHORT.epochs or rate > 1:             # at 1e30 the first epoch is the last
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        simulate([first, second], settled(tmp_path), stop)
    assert RunFolder.of(first, tmp_path).read().status == ("diverged" if rate > 1 else "finished")
    assert not RunFolder.of(second, tmp_path).read().begun


def test_partitions_whose_epochs_differ_do_not_share_a_program(tmp_path):
    common = replace(SHORT, epochs=1, precision="fp64")
    settings = [replace(common, partition=partition) for partition in ("dirichlet", "whole", "iid", "shards:2")]
    for row, alone in zip(
        simulate(settings, settled(tmp_path / "rows")),
        [run for one in settings for run in simulate(one, settled(tmp_path / "alone"))],
        strict=True,
    ):
        assert row.records()[0]["step"] == alone.records()[0]["step"]
        torch.testing.assert_close(final(row)["x"], final(alone)["x"], rtol=1e-9, atol=1e-9)
    task = make_task(common, load("digits"))
    with pytest.raises(qg.InputError, match="need the same steps per epoch"):
        Program(task, settings[:2], CPU)


def test_a_run_that_diverged_leaves_its_program_and_changes_no_other(tmp_path, monkeypatch):
    rows, regroup = [], Program.regroup

    def noted(program, *arguments):
        regroup(program, *arguments)
        rows.append(program.state.x.shape[0])

    monkeypatch.setattr(Program, "regroup", noted)
    good = replace(SHORT, precision="fp64", warmup=0.0, steps=2)
    settings = [replace(good, algorithm=name, topology="lazy/ring:4") for name in ("mimelite", "slowmo:tau=4", "d2+")]
    settings.append(replace(good, topology="one-peer-exponential:4"))
    bad = replace(good, lr=1e12)
    watched = []
    options = settled(tmp_path, utilisation=tmp_path / "utilisation.jsonl")
    *runs, diverged = simulate([*settings, bad], options, lambda runs, records: watched.append(len(runs)))
    used = utilisation(options.utilisation, since=0.0)
    assert used.examples == (5 + 4 + 4) * 4 * 2 * 64, "nodes, steps, batch"
    assert 12 < used.row_seconds / used.seconds["training"] < 20
    assert used.row_seconds == used.computed, "no row was computed in vain"
    assert watched == [5, 4, 4]
    assert rows == [4 * 4]
    assert diverged.status == "diverged"
    assert [record["epoch"] for record in diverged.records()] == [1]
    assert diverged.summary.partition == simulate(replace(bad, lr=0.1), settled(tmp_path))[0].summary.partition
    for run, alone in zip(runs, simulate(settings, settled(tmp_path / "alone")), strict=True):
        ours, theirs = final(run), final(alone)
        assert all((ours[name] - theirs[name]).abs().max() <= 1e-12 for name in ours), run.folder.name
        assert [record["epoch"] for record in run.records()] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*reveal")
def test_waiting_runs_take_the_rows_of_runs_that_end(tmp_path, monkeypatch):
    """Rows are at different epochs then, also after a stop; each run is the same as alone, also its final merge."""
    monkeypatch.setattr("quasiglobal.runs.local.runs_that_fit", lambda *_, **how: 2)
    common = replace(SHORT, precision="fp64", topology="lazy/ring:4", warmup=0.0, eval_every=2, steps=2)
    common = replace(common, communication="merge@end")
    names = ("qg-dsgdm-n", "lt-admm:tau=2", "mimelite")     # lt-admm has a state per edge
    graphs = ("d-cliques:4:2", "lazy/ring:4", "matching:4")     # one of the labels, one that is drawn at each step
    settings = [
        replace(common, lr=1e12),
        *(replace(common, algorithm=name, topology=graph) for name, graph in zip(names, graphs, strict=True)),
        common.with_seed(1),
    ]
    seen = []

    def watch(runs, records):
        seen.append(sorted(record["epoch"] for record in records))
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        simulate(settings, settled(tmp_path / "rows", checkpoint_seconds=1e9), watch)
    runs = simulate(settings, settled(tmp_path / "rows"), watch)
    assert seen == [[1, 1], [1, 2], [2, 3], [1, 3], [1, 2], [2, 3], [3]]
    alone = [run for one in settings for run in simulate(one, settled(tmp_path / "alone"))]
    assert [run.status for run in runs] == ["diverged", *["finished"] * 4] == [run.status for run in alone]
    for run, other in zip(runs[1:], alone[1:], strict=True):
        ours, theirs = final(run), final(other)
        assert all((ours[name] - theirs[name]).abs().max() <= 1e-12 for name in theirs), run.folder.name
        assert (ours["x"] == ours["x"][0]).all()
        assert [record["lr"] for record in run.records()] == [record["lr"] for record in other.records()]
        assert [record.get("accuracy") for record in run.records()] == [
            record.get("accuracy") for record in other.records()]
