"""Files of version 1: half-finished runs resume bit for bit; names and tables stay unchanged.

`version1/` holds runs stopped half-way by version 1 (`half`) and the same runs finished by version 1 (`ended`).
These tests use only the command line and `from_mapping`.
"""

import json
import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quasiglobal.cli import main
from quasiglobal.training.experiment import from_mapping

HERE = Path(__file__).parent / "version1"
RESULTS = Path(__file__).parents[2] / "docs" / "results"

COMMON = ["--model", "cnn", "--norm", "bn", "--width", "0.25", "--alpha", "1", "--batch", "64", "--warmup", "1"]
SIMULATED = {
    "qg-dsgdm-n": ["--topology", "ring:4", "--lr", "0.2", "--seeds", "2"],
    "d2+": ["--topology", "lazy/ring:4", "--lr", "0.05"],
    "mimelite:tau=3": ["--topology", "ring:4", "--lr", "0.05", "--partition", "iid"],
    "slowmo:tau=5": ["--topology", "ring:4", "--lr", "0.05"],
    "dsgdm-n": ["--topology", "ring:4", "--lr", "0.05", "--drop", "0.2", "--churn", "0.1", "--eval-every", "2"],
}
PROCESSES = ["--topology", "ring:4", "--lr", "0.2", "--epochs", "8", "--eval-every", "2", "--processes", "2"]


@pytest.fixture
def qg(monkeypatch):
    """Run `qg` in this process, on one thread like the recorded runs: threads change the order of sums."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["qg", *map(str, words)])
        main()

    assert torch.get_num_threads() == 1
    return run


@pytest.fixture
def exact(qg, tmp_path):
    """Whether this machine rounds like the recording machine: libraries choose their kernels by the CPU.

    CPUs of several generations have the same name, so a recorded run is trained from its beginning as well.
    """
    made = json.loads((HERE / "machine.json").read_text())
    if made != {
        "torch": torch.__version__.partition("+")[0],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_name(),
    }:
        return False
    runs = tmp_path / "whole"
    qg(*training("slowmo:tau=5", runs))
    (folder,) = runs.iterdir()
    ours, theirs = last_rows(folder, HERE / "simulator" / "ended" / folder.name)
    return all(ours[name].equal(value) for name, value in theirs.items())


def training(algorithm, runs):
    """The command of the recorded runs of an algorithm."""
    words = ["--algorithm", algorithm, *SIMULATED[algorithm], "--epochs", "6", "--device", "cpu", "--runs", runs]
    return "train", *COMMON, *words


def last_rows(ours, theirs):
    """The rows of a recorded run's only checkpoint, and those of our checkpoint of the same step."""
    (newest,) = (theirs / "checkpoint").glob("*.safetensors")
    return load_file(ours / "checkpoint" / newest.name), load_file(newest)


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def assert_ended_alike(ours, theirs, exact):
    """Compare models and states bit for bit, records key by key; on another kind of CPU, up to rounding.

    Version 1 spread the bytes of a round over its steps, so `bytes_sent` is compared at the ends of rounds.
    """
    rows, expected = last_rows(ours, theirs)
    assert rows.keys() == expected.keys()
    for name, value in expected.items():
        if exact or not value.is_floating_point():
            assert rows[name].equal(value), name
        else:
            torch.testing.assert_close(rows[name], value, rtol=1e-3, atol=1e-3)
    records, before = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (ours, theirs)
    )
    assert len(records) == len(before)
    tau = int(json.loads((theirs / "experiment.json").read_text())["algorithm"].partition("tau=")[2] or 1)
    for record, old in zip(records, before, strict=True):
        assert record.keys() >= old.keys()
        for name in old.keys() - {"images_per_second"} - (set() if record["step"] % tau == 0 else {"bytes_sent"}):
            close = {"rel": 0, "abs": 1e-6} if exact else {"rel": 1e-2, "abs": 1e-2}
            if name == "test_loss" or not exact:
                assert record[name] == pytest.approx(old[name], **close), name
            else:
                assert record[name] == old[name], name


@pytest.mark.parametrize("algorithm", SIMULATED)
def test_a_half_finished_run_of_the_simulator_resumes_bit_for_bit(tmp_path, qg, algorithm, exact):
    runs = shutil.copytree(HERE / "simulator" / "half", tmp_path / "runs")
    for folder in runs.iterdir():
        if json.loads((folder / "experiment.json").read_text())["algorithm"] != algorithm:
            shutil.rmtree(folder)
    names = sorted(folder.name for folder in runs.iterdir())
    qg(*training(algorithm, runs))
    assert sorted(folder.name for folder in runs.iterdir()) == names, "the experiment's name stayed"
    for name in names:
        assert_ended_alike(runs / name, HERE / "simulator" / "ended" / name, exact)


@pytest.mark.slow
def test_a_half_finished_run_over_processes_resumes_bit_for_bit(tmp_path, qg, exact):
    runs = shutil.copytree(HERE / "distributed" / "half", tmp_path / "runs")
    (before,) = runs.iterdir()
    with pytest.raises(SystemExit) as ended:
        qg("train", *COMMON, *PROCESSES, "--engine", "distributed", "--device", "cpu", "--runs", runs)
    assert ended.value.code == 0
    (folder,) = runs.iterdir()
    assert folder == before
    assert_ended_alike(folder, HERE / "distributed" / "ended" / folder.name, exact)


@pytest.mark.parametrize(("names", "count"), [("version1/names.txt", 108), ("version2/names/recorded-runs.txt", 274)])
def test_the_recorded_runs_are_still_there(names, count):
    recorded = (HERE.parent / names).read_text().split()
    assert len(recorded) == count
    assert set(recorded) <= {folder.name for folder in (RESULTS / "runs").iterdir()}, "a recorded run keeps its name"


def test_the_names_of_all_recorded_runs_follow_from_their_experiments():
    for folder in [*(RESULTS / "runs").iterdir(), *(HERE.parent / "version2" / "store" / "runs").iterdir()]:
        values = json.loads((folder / "experiment.json").read_text())
        assert from_mapping(values, folder.name).name == folder.name


def test_the_tables_are_made_byte_for_byte_from_the_runs_beside_them(tmp_path, qg):
    qg("report", "--runs", RESULTS / "runs", "--out", tmp_path)
    for name in ("tables.md", "tables.tex"):
        assert (tmp_path / name).read_bytes() == (RESULTS / name).read_bytes(), f"qg report makes {name} again"
