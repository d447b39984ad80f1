"""The three readings of the released network: the same weights, tested with other statistics."""

from dataclasses import replace

import pytest
from small_runs import SHORT, settled

import quasiglobal as qg
from quasiglobal.paper.readings import READINGS, ScoreReadings, last_and_best, read_readings
from quasiglobal.runs.local import train

ONE = replace(SHORT, model="resnet8", norm="evonorm-running", width=0.25, epochs=2, lr=0.05)


def test_each_reading_scores_as_a_run_with_its_norm(tmp_path):
    """Training is the same for all norms, so a run with a reading's norm ends with the same weights and its score."""
    (run,) = train(ONE, settled(tmp_path / "all"), callbacks=[ScoreReadings()])
    lines = read_readings(run.folder)
    assert [line["epoch"] for line in lines] == [1, 2]
    for name, norm in READINGS.items():
        (own,) = train(replace(ONE, norm=norm), settled(tmp_path / norm))
        for line, record in zip(lines, own.records(), strict=True):
            assert line[name] == pytest.approx(record["accuracy"], abs=1e-6)
            assert line[f"{name}_averaged"] == pytest.approx(record["accuracy_averaged"], abs=1e-6)
        assert last_and_best(lines, name)[1] == max(line[name] for line in lines)
    assert len({tuple(line[name] for line in lines) for name in READINGS}) > 1


def test_readings_need_all_running_statistics_and_a_folder(tmp_path):
    with pytest.raises(qg.InputError, match="the readings need norm = 'evonorm-running', got 'bn'"):
        train(replace(ONE, norm="bn"), settled(tmp_path), callbacks=[ScoreReadings()])
