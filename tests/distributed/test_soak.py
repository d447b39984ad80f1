"""Fifty random schedules of faults: nobody hangs, everybody finishes, and the models are good."""

import pytest
import soak
import torch

import quasiglobal as qg


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_random_schedule_of_faults_is_survived(tmp_path, seed):
    experiment, faults = soak.schedule(seed)
    run = soak.survive(experiment, faults, tmp_path)
    assert run.status == "finished", (experiment, faults)
    assert run.records[-1]["epoch"] == soak.EPOCHS
    rows, _ = run.newest()
    assert len(rows["x"]) == qg.topology.parse(experiment.topology).n
    assert all(torch.isfinite(value).all() for value in rows.values())
    assert run.records[-1]["accuracy_worst"] > 0.8, (experiment, faults)
