"""Features of the one training loop, over processes: agreed checkpoints, Ctrl-C, the lock, and resuming."""

import signal

import pytest
from commands import rank, scalars, train, wait_for_epoch

from quasiglobal.common.files import alone
from quasiglobal.errors import InputError
from quasiglobal.runs import checkpoints
from quasiglobal.runs.checkpoints import parts_of
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs

WORDS = ["--topology", "ring:4", "--precision", "fp64", "--epochs", "60", "--eval-every", "7"]
PROCESSES = ["--engine", "distributed", "--processes", "2"]


def epochs_of_parts(folder):
    """Return the epochs of each process's checkpoints."""
    return [set(checkpoints.epochs(path)) for path in sorted(folder.glob("*/parts/*/checkpoint"))]


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["the launcher", "process 1"])
def test_ctrl_c_stops_all_processes_after_one_epoch_and_the_simulator_resumes_from_it(tmp_path, receiver):
    process = train(tmp_path, *WORDS, *PROCESSES, "--checkpoint-seconds", "0.3", "--tensorboard")
    wait_for_epoch(tmp_path, 1, 15)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(InputError, match="is being trained by another process"), alone(folder):
        pass
    (process if receiver == "the launcher" else rank(process, 1)).send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.count("run the same command again to resume") == 1
    first, second = epochs_of_parts(tmp_path)
    assert first == second, "the epoch at which all stopped, and one before it that was agreed on"
    assert len(first) == 2
    assert 15 <= max(first) < 60
    assert [part.last_epoch() for part in parts_of(folder)] == [max(first)] * 2
    (unfinished,) = find_runs(tmp_path)
    assert list(scalars(unfinished, "loss")) == list(range(1, max(first) + 1))
    tested = [record["epoch"] for record in unfinished.records() if "accuracy_averaged" in record]
    assert tested == list(range(7, max(first) + 1, 7))
    simulate(unfinished.experiment, Options(runs=tmp_path, device="cpu"))
    (run,) = find_runs(tmp_path)
    assert [record["epoch"] for record in run.records()] == list(range(1, 61))
    assert [record["epoch"] for record in run.records() if "consensus_distance" in record] == [*range(7, 61, 7), 60]
