"""Sweeps on a Ray cluster of two workers of one CPU each, on this machine."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import quasiglobal
from quasiglobal import InputError
from quasiglobal.reproduction.paper.reproduce import run_missing
from quasiglobal.reproduction.paper.tables import TABLES
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.sweep import by_setting, sweep
from quasiglobal.runs.tuning import tune
from quasiglobal.training.experiment import Experiment

TINY = Experiment(model="mlp", topology="ring:4", algorithm="dsgd", epochs=1, alpha=1.0, warmup=0.0)


def test_without_ray_it_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"Ray is not installed: pip install 'quasiglobal\[ray\]'"):
        sweep([TINY], Options(runs=tmp_path, on="ray"))


def test_seeds_and_rates_of_a_cell_are_one_job_of_a_gpu():
    alike = [replace(TINY, lr=lr, seed=seed) for lr in (0.1, 0.2) for seed in (0, 1)]
    other = replace(TINY, alpha=0.1)
    assert by_setting([*alike, other]) == [alike, [other]]


MINE = """
import os
from pathlib import Path
from torch import nn

def network():
    (Path(__file__).parent / f"seen-{os.getpid()}").touch()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def dies_once():
    mark = Path(__file__).parent / "died"
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return network()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder from which the workers import user-defined models."""
    place = tmp_path_factory.mktemp("mine")
    (place / "on_the_cluster.py").write_text(MINE)
    return place


@pytest.fixture(scope="module")
def cluster(folder):
    ray = pytest.importorskip("ray")
    utils = pytest.importorskip("ray.cluster_utils")
    before = dict(os.environ)
    source = str(Path(quasiglobal.__file__).parent.parent)
    os.environ |= {"PYTHONPATH": f"{source}:{folder}", "RAY_USAGE_STATS_ENABLED": "0"}
    nodes = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = nodes.address
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_grid_tuned_on_the_cluster_is_the_one_tuned_here(cluster, folder, tmp_path):
    over = {"lr": (0.05, 0.2, 0.8)}
    (there,) = tune([TINY], over, Options(runs=tmp_path / "there", on="ray", seeds=2), cap=3)
    (here,) = tune([TINY], over, Options(runs=tmp_path / "here", seeds=2), cap=3)
    assert there.scores == here.scores
    assert there.best == here.best
    assert [run.status for run in there.runs] == ["finished"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_cell_of_the_paper_is_reproduced_on_the_cluster(cluster, tmp_path):
    (found,) = run_missing(TABLES["single-worker"], "smoke", 2, ["SGDm | BN"], Options(runs=tmp_path, on="ray"))
    assert len(found.trials) == 3
    assert [run.status for run in found.runs] == ["finished"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_both_workers_take_part_and_a_cell_whose_worker_dies_is_run_again(cluster, folder, tmp_path):
    cells = [replace(TINY, model="on_the_cluster:network", lr=lr) for lr in (0.05, 0.1, 0.2, 0.4)]
    cells.append(replace(TINY, model="on_the_cluster:dies_once"))
    heard = []
    runs = sweep(cells, Options(runs=tmp_path, on="ray"), lambda runs, records: heard.append(len(records)))
    assert [run.status for run in runs] == ["finished"] * 5
    assert len(heard) == 5
    assert (folder / "died").exists()
    assert len(list(folder.glob("seen-*"))) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_what_is_in_the_store_is_not_sent_and_bad_input_is_not_retried(cluster, folder, tmp_path):
    simulate(TINY, Options(runs=tmp_path))
    before = set(folder.iterdir())
    (run,) = sweep([TINY], Options(runs=tmp_path, on="ray"))
    assert run.status == "finished"
    assert set(folder.iterdir()) == before
    with pytest.raises(InputError, match="unknown model 'mpl'; did you mean 'mlp'"):
        sweep([replace(TINY, model="mpl")], Options(runs=tmp_path, on="ray"))
