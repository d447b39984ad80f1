"""Estimates before a training: time, traffic, memory."""

from dataclasses import replace

import pytest
from small_runs import SHORT, settled

from quasiglobal.data.sources import load
from quasiglobal.runs.building import make_task
from quasiglobal.runs.estimate import estimate, prepare
from quasiglobal.runs.memory import bytes_of_run


def test_an_estimate_is_what_the_run_takes(tmp_path):
    program = prepare(replace(SHORT, algorithm="dsgdm-n"), settled(tmp_path))
    taken = estimate(program, tmp_path / "not" / "there")
    d = program.layout.size
    assert (taken.parameters, taken.steps, taken.sent_a_step) == (d, 18, 2 * 4 * d)
    assert (taken.rows, taken.checkpoints) == (3 * 4 * 4 * d, 2 * 2 * 4 * 4 * d)
    assert 0 < taken.step_seconds * 18 < taken.seconds < 60
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"batch": 512}, "fewer than its batch"), ({"algorithm": "sgdm-n"}, "iid"), ({"algorithm": "d2"}, "lazy/ring:4")],
)
def test_an_estimate_warns(tmp_path, change, says):
    with pytest.warns(UserWarning, match=says):
        estimate(prepare(replace(SHORT, **change), settled(tmp_path)), tmp_path)


def test_what_a_run_takes_grows_with_its_nodes_its_batch_and_its_algorithms_state():
    def bytes_of(**changes):
        experiment = replace(SHORT, model="cnn", **changes)
        return bytes_of_run(make_task(experiment, load("digits")), experiment)

    assert bytes_of(topology="ring:8") == 2 * bytes_of()
    assert bytes_of(batch=128) > bytes_of() > bytes_of(batch=32)
    assert bytes_of(algorithm="dadam") > bytes_of(algorithm="dsgd")
    assert bytes_of(precision="fp64") > bytes_of()
