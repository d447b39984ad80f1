"""Records for TensorBoard."""

import sys

import pytest
from small_runs import SHORT, settled

import quasiglobal as qg
from quasiglobal.runs.local import simulate


def test_tensorboard_sees_the_measures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = simulate(SHORT, settled(tmp_path, tensorboard=True))
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("accuracy")] == [1, 2, 3]
    assert events.Scalars("loss")[-1].value == pytest.approx(run.records()[-1]["loss"])


def test_tensorboard_that_is_not_there_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(qg.InputError, match="pip install"):
        simulate(SHORT, settled(tmp_path / "runs", tensorboard=True))
    assert not (tmp_path / "runs").exists()
