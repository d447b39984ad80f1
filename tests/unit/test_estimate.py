"""Estimates before a training: time, traffic, memory."""

from dataclasses import replace

import pytest
from small_runs import SHORT, only_runs_together, settled

import quasiglobal as qg
from quasiglobal.data.sources import load
from quasiglobal.peers.bandwidth import ON_THE_WIRE, read_bandwidth
from quasiglobal.runs.building import make_task
from quasiglobal.runs.estimate import DAY, bytes_of_run, estimate, prepare


def test_an_estimate_is_what_the_run_takes(tmp_path):
    options = settled(tmp_path / "not" / "there")
    task, experiments = prepare(replace(SHORT, algorithm="dsgdm-n"), options)
    taken = estimate(task, experiments, options)
    d = sum(parameter.numel() for parameter in task.module(0).parameters())
    assert (taken.parameters, taken.steps, taken.sent_a_step) == (d, 18, 2 * 4 * d)
    assert (taken.rows, taken.checkpoints) == (3 * 4 * 4 * d, 2 * 2 * 4 * 4 * d)
    assert 0 < taken.step_seconds * 18 < taken.seconds < 60
    assert not list(tmp_path.iterdir())


def test_a_day_of_bytes_is_bounded_by_the_steps_the_link_and_the_run(tmp_path):
    taken = replace(estimate(*prepare(SHORT, settled(tmp_path)), settled(tmp_path)), steps=10**9, step_seconds=0.5)
    assert taken.sent_a_day() == (taken.sent_a_step * 2 * DAY, 0.5)
    a_day, seconds = taken.sent_a_day(read_bandwidth("100kbit"))
    assert seconds > 0.5
    assert a_day == pytest.approx(12_500 * DAY / ON_THE_WIRE)
    assert replace(taken, steps=7).sent_a_day()[0] == 7 * taken.sent_a_step


@pytest.mark.parametrize(
    ("change", "says"),
    [({"batch": 512}, "fewer than its batch"), ({"algorithm": "sgdm-n"}, "iid"), ({"algorithm": "d2"}, "lazy/ring:4")],
)
def test_an_estimate_warns(tmp_path, change, says):
    with pytest.warns(UserWarning, match=says):
        estimate(*prepare(replace(SHORT, **change), settled(tmp_path)), settled(tmp_path))


def test_an_estimate_is_of_the_runs_that_fit_together(tmp_path, monkeypatch):
    only_runs_together(monkeypatch, 2)
    options = settled(tmp_path, seeds=5)
    several, one = (estimate(*prepare(SHORT, chosen), chosen) for chosen in (options, settled(tmp_path)))
    assert (several.together, one.together) == (2, 1)
    assert (several.rows, several.checkpoints) == (2 * one.rows, 5 * one.checkpoints)


def test_a_run_that_does_not_fit_is_one_sentence(tmp_path, monkeypatch):
    only_runs_together(monkeypatch, 0)
    with pytest.raises(qg.InputError, match="4 models mlp with batch 64 do not fit the memory; use a smaller --batch"):
        estimate(*prepare(SHORT, settled(tmp_path)), settled(tmp_path))


def test_what_a_run_takes_grows_with_its_nodes_its_batch_and_its_algorithms_state():
    def bytes_of(**changes):
        experiment = replace(SHORT, model="cnn", **changes)
        return bytes_of_run(make_task(experiment, load("digits")), experiment)

    assert bytes_of(topology="ring:8") == 2 * bytes_of()
    assert bytes_of(batch=128) > bytes_of() > bytes_of(batch=32)
    assert bytes_of(algorithm="dadam") > bytes_of(algorithm="dsgd")
    assert bytes_of(precision="fp64") > bytes_of()
