"""Features of the one training loop, over processes: agreed checkpoints, Ctrl-C, the lock, and resuming."""

import os
import signal

import pytest
from commands import PATIENCE, train, wait_for_epoch

from quasiglobal.common.files import alone
from quasiglobal.errors import InputError
from quasiglobal.runs import checkpoints
from quasiglobal.runs.local import train as simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs

WORDS = ["--topology", "ring:4", "--precision", "fp64", "--epochs", "60", "--eval-every", "30"]
PROCESSES = ["--engine", "distributed", "--processes", "2"]


def epochs_of_parts(folder):
    """Return the epochs of each process's checkpoints."""
    return [set(checkpoints.epochs(path)) for path in sorted(folder.glob("*/parts/*/checkpoint"))]


def test_ctrl_c_stops_all_processes_after_one_epoch_and_the_simulator_goes_on_from_it(tmp_path):
    process = train(tmp_path, *WORDS, *PROCESSES, "--checkpoint-seconds", "0.3", start_new_session=True)
    wait_for_epoch(tmp_path, 1, 15)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(InputError, match="is being trained by another process"), alone(folder):
        pass
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    first, second = epochs_of_parts(tmp_path)
    assert first == second, "the epoch at which all stopped, and an earlier agreed epoch"
    assert len(first) == 2
    assert 15 <= max(first) < 60
    measured = [path.read_text().splitlines() for path in folder.glob("parts/*/metrics.jsonl")]
    assert [len(lines) for lines in measured] == [max(first)] * 2
    (unfinished,) = find_runs(tmp_path)
    simulate(unfinished.experiment, Options(runs=tmp_path, device="cpu"))
    (run,) = find_runs(tmp_path)
    assert [record["epoch"] for record in run.records()] == list(range(1, 61))
    assert [record["epoch"] for record in run.records() if "consensus_distance" in record] == [30, 60]
