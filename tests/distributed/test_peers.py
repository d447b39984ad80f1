"""Owners who share no data: `qg node`."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import quasiglobal as qg
from quasiglobal import exports
from quasiglobal.engines.joining import serve
from quasiglobal.experiment import Experiment, from_toml
from quasiglobal.parts import newest
from quasiglobal.peers import agreement
from quasiglobal.runs import Options, data_of, find, train

EXPERIMENT = """
model = "mlp"
topology = "ring:4"
precision = "fp64"
epochs = {epochs}
steps = 5
eval_every = 50
lr = 0.05
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
shape = [1, 8, 8]
mean = [0.3]
std = [0.4]
"""


@pytest.fixture
def owners(tmp_path):
    """Four owners of different sizes who lack different digits, and a file with the data of all."""
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    test, train = slice(0, 200), slice(200, None)
    owner = np.array([min(digit // 2, 3) for digit in y[train]])
    order = np.argsort(owner, kind="stable")
    pooled = {"x": x[train][order], "y": y[train][order], "owner": owner[order]}
    for k in range(4):
        mine = pooled["owner"] == k
        seen = np.isin(y[test], np.unique(pooled["y"][mine]))
        tests = {"x_test": x[test][seen], "y_test": y[test][seen]}
        np.savez(tmp_path / f"{k}.npz", x=pooled["x"][mine], y=pooled["y"][mine], **tests)
    np.savez(tmp_path / "all.npz", **pooled, x_test=x[test], y_test=y[test], owner_test=np.zeros(200))
    return tmp_path


@pytest.fixture
def node(owners):
    """Starts a node; none outlives the test."""
    started = []

    def start(number, port, *words):
        command = [sys.executable, "-m", "quasiglobal", "node", "experiment.toml", "--node", str(number)]
        command += ["--data", f"{number}.npz", "--rendezvous", f"127.0.0.1:{port}", "--runs", f"runs{number}", *words]
        said = open(owners / f"{number}.log", "a")              # noqa: SIM115, a pipe would fill up
        one_core = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=owners, env=one_core, stdout=subprocess.DEVNULL, stderr=said))
        said.close()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process, log, status=0):
    """What a node said, once it is over."""
    assert process.wait(timeout=120) == status, log.read_text()
    return log.read_text()


def test_owners_get_what_the_simulator_gets_from_the_data_of_all(owners, node):
    (owners / "experiment.toml").write_text(EXPERIMENT.format(epochs=3))
    server = serve("127.0.0.1", 0)
    nodes = [node(k, server.port, "--log", "json") for k in range(4)]
    for k, process in enumerate(nodes):
        said = ended(process, owners / f"{k}.log")
        epochs = [json.loads(line) for line in said.splitlines()]
        assert [line["epoch"] for line in epochs] == [1, 2, 3]
        (run,) = find(owners / f"runs{k}")
        assert run.status == "finished"
        assert [path.name for path in run.folder.glob("parts/*")] == [str(k)]       # nothing of the others is here

    pooled = {"data": f"folder:{owners / 'all.npz'}", "partition": "by:owner"}
    whole = {**from_toml(owners / "experiment.toml").__dict__, **pooled}
    (simulated,) = train(Experiment(**whole), Options(runs=owners / "runs"))
    found = simulated.newest()
    assert found is not None
    for k in range(4):
        (run,) = find(owners / f"runs{k}")
        rows, epoch, nodes_here = newest(run.folder)
        assert (epoch, nodes_here) == (3, [k])
        assert torch.allclose(rows["x"][0], found[0]["x"][k], rtol=0, atol=1e-12)

    model = exports.export(run, "3")                            # it needs nobody's data
    tests = data_of(run.experiment, None, f"folder:{owners / 'all.npz'}")
    right = model.predict(tests, tests.test) == tests.test.y
    assert right.double().mean() > 0.3


@pytest.mark.slow
def test_a_node_and_the_rendezvous_come_back(owners, node):
    (owners / "experiment.toml").write_text(EXPERIMENT.format(epochs=600))
    server = serve("127.0.0.1", 0)
    port = server.port
    nodes = [node(k, port, "--peer-timeout", "5") for k in range(4)]
    wait_for(lambda: list(owners.glob("runs2/*/parts/2/checkpoint/000005.json")))
    del server                                                  # the rendezvous goes,
    nodes[2].kill()                                             # a node too,
    nodes[2].wait()
    time.sleep(3)
    server = serve("127.0.0.1", port)                           # and both are back
    nodes[2] = node(2, server.port, "--peer-timeout", "5")
    for k, process in enumerate(nodes):
        said = ended(process, owners / f"{k}.log")
        (run,) = find(owners / f"runs{k}")
        assert run.records[-1]["epoch"] == 600
        if k in (1, 3):
            assert f"process {k} goes on without process 2" in said
            assert f"process {k} has process 2 back" in said
    models = torch.cat([newest(next(find(owners / f"runs{k}")).folder)[0]["x"] for k in range(4)])
    assert (models - models.mean(dim=0)).norm() < 0.05 * models.norm()


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_what_owners_do_not_agree_on_is_said_in_one_sentence(owners, node):
    with pytest.raises(qg.InputError, match="have to agree on classes, shape, mean, std, steps"):
        agreement(Experiment())
    (owners / "experiment.toml").write_text(EXPERIMENT.format(epochs=1))
    experiment = from_toml(owners / "experiment.toml")

    def refused(match, **terms):
        with pytest.raises(qg.InputError, match=match):
            data_of(Experiment(**{**experiment.__dict__, **terms}), None, f"folder:{owners / '3.npz'}")

    refused("has the class '2', but no, yes are agreed", classes=("no", "yes"))
    refused(r"shape \[1, 8, 8\], but \[3, 8, 8\] is agreed", shape=(3, 8, 8))
    refused("has 1 channels, but mean has 2 numbers", mean=(0.1, 0.2))
    refused("std must be > 0", std=(0.0,))
    for words, match in (
        ({"number": 7, "port": 1}, "node must be from 0 to 3"),
        ({"number": 0, "port": "x"}, "rendezvous must be HOST:PORT"),
    ):
        process = node(words["number"], words["port"])
        said = ended(process, owners / f"{words['number']}.log", status=2)
        assert match in said
        assert len(said.splitlines()) == 1
