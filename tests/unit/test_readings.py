"""The three readings of the released network: the same weights, tested with other statistics."""

import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import SHORT, assert_same_run, settled

import quasiglobal as qg
from quasiglobal.common.files import write_lines
from quasiglobal.reproduction.paper.readings import (
    FILE,
    READINGS,
    ScoreReadings,
    ended_runs,
    last_and_best,
    read_readings,
)
from quasiglobal.runs.local import simulate
from quasiglobal.runs.store import RunFolder, RunStore

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "readings.py"))
experiments, table, table_of_more_tests = (SCRIPT[name] for name in ("experiments", "table", "table_of_more_tests"))

ONE = replace(SHORT, model="resnet8", norm="evonorm-running", width=0.25, epochs=2, lr=0.05)


@pytest.mark.slow
def test_each_reading_scores_as_a_run_with_its_norm(tmp_path):
    """Training is the same for all norms, so a run with a reading's norm ends with the same weights and its score."""
    (run,) = simulate(ONE, settled(tmp_path / "all"), callbacks=[ScoreReadings()])
    lines = read_readings(run)
    assert [line["epoch"] for line in lines] == [1, 2]
    for name, norm in READINGS.items():
        (own,) = simulate(replace(ONE, norm=norm), settled(tmp_path / norm))
        for line, record in zip(lines, own.records(), strict=True):
            assert line[name] == pytest.approx(record["accuracy"], abs=1e-6)
            assert line[f"{name}_averaged"] == pytest.approx(record["accuracy_averaged"], abs=1e-6)
        (read,) = ended_runs(RunStore.read(tmp_path / "all"), own.experiment)
        assert read.experiment == own.experiment
        assert read.summary.last["accuracy"] == pytest.approx(own.summary.last["accuracy"], abs=1e-6)
        assert read.records()[-1].keys() <= own.records()[-1].keys()
        assert last_and_best(lines, name)[1] == max(line[name] for line in lines)
    assert len({tuple(line[name] for line in lines) for name in READINGS}) > 1


@pytest.mark.slow
def test_chosen_runs_are_tested_in_every_epoch_and_stay_the_same_runs(tmp_path):
    one = replace(ONE, topology="ring:3", epochs=3, eval_every=2, steps=2)
    both = [one, one.with_seed(1)]
    plain = simulate(both, settled(tmp_path / "plain"), callbacks=[ScoreReadings()])
    often = simulate(both, settled(tmp_path / "often"), callbacks=[ScoreReadings(["*-s1-*"])])
    for usual, run, tested in zip(plain, often, ([2, 3], [1, 2, 3]), strict=True):
        assert_same_run(usual, run)
        assert run.folder.name == usual.folder.name
        assert [line["epoch"] for line in read_readings(run, every_epoch=True)] == tested
        assert read_readings(run) == read_readings(usual)
    assert table_of_more_tests(RunStore.read(tmp_path / "plain")) == ""
    assert "-s1-" in table_of_more_tests(RunStore.read(tmp_path / "often"))
    assert "-s0-" not in table_of_more_tests(RunStore.read(tmp_path / "often"))


def test_the_table_of_readings_measures_deviations_in_units_of_the_noise(tmp_path):
    wanted = experiments(RunStore.read(tmp_path / "none"), seeds=2)
    assert len({one.hash for one in wanted}) == 20            # centralized, and three methods at three α; two seeds
    assert {one.norm for one in wanted} == {"evonorm-running"}
    for one in wanted:
        if one.algorithm == "qg-dsgdm-n" and one.alpha == 1:
            folder = RunFolder.of(one, tmp_path / "runs")
            folder.begin(None)
            folder.finish("finished", {})
            wrong = 0.01 * one.seed
            write_lines(folder.folder / FILE, [
                {"epoch": 290, "batch": 0.95 - wrong, "hybrid": 0.9128, "running": 0.5},
                {"epoch": 300, "batch": 0.90 - wrong, "hybrid": 0.9128, "running": 0.5},
            ])
    *_, row, of_the_method, total = table(RunStore.read(tmp_path / "runs")).strip().splitlines()
    assert "91.28 ± 0.38 | 89.50 ± 0.71 (2) | 94.50 ± 0.71 (2) | 91.28 ± 0.00 (2)" in row
    error = math.sqrt(0.5**2 + 0.38**2 / 3)
    assert f"| {((89.5 - 91.28) / error) ** 2:.1f} | {((94.5 - 91.28) / error) ** 2:.1f} | 0.0 | 0.0 |" in total
    assert of_the_method.split(" | ")[1:] == total.split(" | ")[1:]


def test_readings_need_all_running_statistics_and_a_folder(tmp_path):
    with pytest.raises(qg.InputError, match="the readings need norm = 'evonorm-running', got 'bn'"):
        simulate(replace(ONE, norm="bn"), settled(tmp_path), callbacks=[ScoreReadings()])
