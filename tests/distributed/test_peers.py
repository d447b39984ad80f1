"""`qg node`: training by owners who share no data."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import wait_for

import quasiglobal as qg
from quasiglobal.cli import share
from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs import checkpoints
from quasiglobal.runs.agreement import agreement
from quasiglobal.runs.building import data_of
from quasiglobal.runs.checkpoints import newest_of_parts
from quasiglobal.runs.export import export
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import Experiment, from_toml


@pytest.mark.slow
def test_owners_get_what_the_simulator_gets_from_the_data_of_all(tmp_path, owners, capsys):
    four, server = owners(epochs=3), serve("127.0.0.1", 0)
    words = ["--log", "json", "--tensorboard", "--checkpoint-seconds", "1000"]
    nodes = [four.start(k, f"127.0.0.1:{server.port}", *words) for k in range(4)]
    for k, process in enumerate(nodes):
        four.said(process, k)
        opening, *epochs = [json.loads(line) for line in four.printed(k).read_text().splitlines()]
        assert opening["message"].startswith("run folder: ")
        assert [line["epoch"] for line in epochs] == [1, 2, 3]
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert run.status == "finished"
        assert [path.name for path in run.folder.glob("parts/*")] == [str(k)]       # no other node's files
        assert checkpoints.epochs(run.folder / "parts" / str(k) / "checkpoint") == [3], "only the last epoch"
        assert list(run.folder.glob("tensorboard/events*"))
        assert not any("consensus_distance" in record for record in run.records())

    pooled = {"data": f"folder:{tmp_path / 'all.npz'}", "partition": "by:owner"}
    whole = replace(from_toml(tmp_path / "experiment.toml"), **pooled)
    (simulated,) = simulate(whole, Options(runs=tmp_path / "runs"))
    found = checkpoints.newest(simulated.folder / "checkpoint")
    assert found is not None
    for k in range(4):
        (run,) = find_runs(tmp_path / f"runs{k}")
        saved, nodes_here = newest_of_parts(run.folder)
        assert (saved.epochs, nodes_here) == (3, [k])
        assert torch.allclose(saved.rows["x"][0], found.rows["x"][k], rtol=0, atol=1e-12)

    model = export(run, "3")                            # needs no data
    tests = data_of(run.experiment, None, f"folder:{tmp_path / 'all.npz'}")
    right = model.outputs(tests).argmax(dim=-1) == tests.test.y
    assert right.double().mean() > 0.3
    share.export(run.folder, out=tmp_path / "model.safetensors")
    assert "holds node 3 alone: this is its own model, not the average" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_node_and_the_rendezvous_come_back(tmp_path, owners):
    four, server = owners(epochs=600), serve("127.0.0.1", 0)
    place = f"127.0.0.1:{server.port}"
    words = ["--peer-timeout", "5", "--checkpoint-seconds", "0"]
    nodes = [four.start(k, place, *words) for k in range(4)]
    wait_for(lambda: list(tmp_path.glob("runs2/*/parts/2/checkpoint/000005.json")))
    port = server.port
    del server                                                  # stops the rendezvous
    nodes[2].kill()
    nodes[2].wait()
    time.sleep(3)
    server = serve("127.0.0.1", port)
    nodes[2] = four.start(2, place, *words)
    for k, process in enumerate(nodes):
        said = four.said(process, k)
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert run.records()[-1]["epoch"] == 600
        if k in (1, 3):
            assert f"process {k} continues without process 2" in said
            assert f"process {k} reconnected to process 2" in said
    runs = [next(find_runs(tmp_path / f"runs{k}")) for k in range(4)]
    models = torch.cat([newest_of_parts(run.folder)[0].rows["x"] for run in runs])
    assert (models - models.mean(dim=0)).norm() < 0.05 * models.norm()
    assert server.port == port


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [10**9, 5 * 6, 5 * 6 + 1])      # beyond the run, its last step, after its end
def test_no_claimed_step_ends_a_run(tmp_path, owners, claimed):
    four, server = owners(epochs=6), serve("127.0.0.1", 0)
    place, words = f"127.0.0.1:{server.port}", ["--peer-timeout", "3"]
    liar = (Path(__file__).parent / "liar.py", str(claimed))
    nodes = [four.start(k, place, *words, program=liar if k == 2 else ("-m", "quasiglobal")) for k in range(4)]
    for k in (0, 1, 3):
        four.said(nodes[k], k)
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert [record["epoch"] for record in run.records()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_what_owners_do_not_agree_on_is_said_in_one_sentence(tmp_path, owners):
    with pytest.raises(qg.InputError, match="have to agree on classes, shape, steps, mean, std"):
        agreement(Experiment())
    four = owners(epochs=1)
    experiment = from_toml(tmp_path / "experiment.toml")

    def refused(match, **terms):
        with pytest.raises(qg.InputError, match=match):
            data_of(replace(experiment, **terms), None, f"folder:{tmp_path / '3.npz'}")

    refused("has the class '2', but the agreed classes are no, yes", classes=("no", "yes"))
    refused(r"shape \[1, 8, 8\], but the agreed shape is \[3, 8, 8\]", shape=(3, 8, 8))
    refused("has 1 channels, but mean has 2 numbers", mean=(0.1, 0.2))
    refused("std must be > 0", std=(0.0,))
    for number, rendezvous, match in ((7, "here:1", "node must be from 0 to 3"), (0, "here", "must be HOST:PORT")):
        said = four.said(four.start(number, rendezvous), number, status=2)
        assert match in said
        assert len(said.splitlines()) == 1
