"""Every kind of task of a user's own, over processes: the simulator's numbers, callbacks, and an early end."""

import subprocess
import sys
from pathlib import Path

import own_training
import pytest

from quasiglobal.runs.store import RunStore


@pytest.fixture(scope="module")
def over_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    script = Path(own_training.__file__)
    words = ["--standalone", "--nproc-per-node", "2", script, folder]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", own_training.TASKS)
def test_a_task_over_processes_is_the_simulators(over_processes, kind):
    (run,) = RunStore.read(over_processes / str(list(own_training.TASKS).index(kind))).runs
    there, here = run.records(), own_training.trained(kind)
    assert run.experiment == here.runs[0].experiment
    for ours, theirs in zip(there, here.records, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"images_per_second"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-8, abs=1e-9), name
    assert sorted(path.name for path in (run.folder / "best").glob("*.safetensors")) == [
        f"node-{node}.safetensors" for node in range(4)
    ]


@pytest.mark.slow
def test_a_callback_of_process_0_ends_the_run_of_all(over_processes):
    (run,) = RunStore.read(over_processes / "early").runs
    assert run.status == "finished"
    assert 2 <= len(run.records()) < 400


@pytest.mark.slow
def test_processes_with_other_models_say_so_at_once(tmp_path):
    script = tmp_path / "unseeded.py"
    script.write_text(
        "import torch, quasiglobal as qg\n"
        "x = torch.ones(80, 3)\n"
        "task = qg.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, (x, x[:, :1]))\n"
        "qg.train(task, 'dsgd', 'ring:4', 2, engine='distributed', device='cpu')\n"
    )
    words = ["--standalone", "--nproc-per-node", "2", script]
    line = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert "process 1 has another model than process 0; call torch.manual_seed" in done.stderr
