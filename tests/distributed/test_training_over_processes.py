"""Runs over processes: the simulator's numbers and run folder, and recovery from faults."""

import json
import signal
import time
from dataclasses import replace

import psutil
import pytest
import torch
from commands import PATIENCE, ended, rank, scalars, train, train_apart, wait_for, wait_for_epoch

from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs import checkpoints
from quasiglobal.runs.checkpoints import Part, records_of
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import Experiment

EXACT = ["--topology", "ring:8", "--precision", "fp64", "--epochs", "6", "--eval-every", "2"]


def rows(folder):
    (run,) = find_runs(folder)
    found = checkpoints.newest(run.folder / "checkpoint")
    assert found is not None
    return found.rows


def same(one, other, tolerance):
    return all((one[name] - other[name]).norm() <= tolerance * (1 + other[name].norm()) for name in other)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    exact = replace(CONSTANT, topology="ring:8", precision="fp64", epochs=6, eval_every=2, milestones=(0.5, 0.75))
    simulate(exact, Options(runs=folder, device="cpu"))
    return folder


@pytest.mark.slow
def test_a_run_is_the_simulators(tmp_path, simulated):
    said = ended(train(tmp_path, *EXACT, "--engine", "distributed", "--processes", "3", "--tensorboard"))
    assert "finished" in said
    assert same(rows(tmp_path), rows(simulated), 1e-11)
    (run,), (whole,) = find_runs(tmp_path), find_runs(simulated)
    assert run.folder.name == whole.folder.name
    assert len(run.records()) == len(whole.records())
    for ours, theirs in zip(run.records(), whole.records(), strict=True):
        for name, value in theirs.items():
            if name != "images_per_second":
                assert ours[name] == pytest.approx(value, rel=1e-6), name
    assert not list(run.folder.glob("parts/*/tested")), "process 0 deletes the files that it has read"
    averaged = {record["epoch"]: record["accuracy_averaged"] for record in run.records() if "accuracy" in record}
    assert scalars(run, "accuracy_averaged") == pytest.approx(averaged)
    sent = [json.loads(path.read_text())["edges"] for path in run.folder.glob("parts/*/summary.json")]
    d = rows(tmp_path)["x"].shape[1]
    assert {edge["sent"] for edges in sent for edge in edges.values()} == {36 * d * 8}   # one row each way, float64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "topology", "communication"),
    [
        ("lt-admm:tau=4", "ring:8", "merge@end"), ("relaysgd:beta=0.9", "star:8", ""),
        ("sgp", "ring:8", "complete@0.5-0.8"),
    ],
)
def test_messages_per_edge_and_schedules_of_communication_are_the_simulators(
    algorithm, topology, communication, tmp_path
):
    exact = replace(
        CONSTANT, topology=topology, precision="fp64", epochs=2, algorithm=algorithm, communication=communication,
        lr=0.02,
    )
    simulate(exact, Options(runs=tmp_path / "simulated", device="cpu"))
    words = ["--topology", topology, "--precision", "fp64", "--epochs", "2", "--algorithm", algorithm, "--lr", "0.02"]
    words += ["--communication", communication] if communication else []
    ended(train(tmp_path / "processes", *words, "--milestones", "--engine", "distributed", "--processes", "3"))
    assert same(rows(tmp_path / "processes"), rows(tmp_path / "simulated"), 1e-11)
    (run,), (whole,) = find_runs(tmp_path / "processes"), find_runs(tmp_path / "simulated")
    assert run.folder.name == whole.folder.name
    assert run.records()[-1]["bytes_sent"] == whole.records()[-1]["bytes_sent"]


@pytest.mark.slow
def test_a_run_goes_on_over_other_processes_and_in_the_simulator(tmp_path, simulated):
    for processes, epoch in ((2, 2), (3, 4)):
        words = ["--checkpoint-seconds", "0", "--engine", "distributed", "--processes", str(processes)]
        process = train(tmp_path, *EXACT, *words)
        wait_for(lambda epoch=epoch: list(tmp_path.glob(f"*/parts/1/checkpoint/{epoch:06d}.json")))
        children = psutil.Process(process.pid).children()
        process.kill()
        for child in children:
            child.kill()
        process.communicate()
    (unfinished,) = find_runs(tmp_path)
    simulate(unfinished.experiment, Options(runs=tmp_path, device="cpu"))
    assert same(rows(tmp_path), rows(simulated), 1e-11)
    (run,), (whole,) = find_runs(tmp_path), find_runs(simulated)
    assert [record["epoch"] for record in run.records()] == [record["epoch"] for record in whole.records()]


def test_who_comes_back_at_the_end_does_not_cut_the_records_short(tmp_path):
    there, away = Part(tmp_path, 0, [0]), Part(tmp_path, 1, [1])
    for part in (there, away):
        part.begin(0)
    for epoch in (1, 2, 3):
        measured = {"epoch": epoch, "step": epoch, "lr": 0.1, "loss": [1.0], "train_accuracy": [0.5]}
        there.write(measured | {"images_per_second": 1.0})
    assert records_of([there, away]) == []                  # process 1 may still measure them
    away.finish("finished", {})
    assert [record["epoch"] for record in records_of([there, away])] == [1, 2, 3]


CONSTANT = Experiment(model="mlp", lr=0.05, alpha=1.0, eval_every=10, topology="ring:4", epochs=100, milestones=())
LONG = ["--topology", "ring:4", "--epochs", "100", "--milestones"]
LONG += ["--engine", "distributed", "--processes", "4", "--peer-timeout", "3"]


@pytest.mark.slow
def test_a_killed_process_is_missed_and_comes_back(tmp_path):
    simulate(CONSTANT, Options(runs=tmp_path / "whole", device="cpu"))
    process = train(tmp_path, *LONG)
    wait_for_epoch(tmp_path, 2, 4)
    rank(process, 2).send_signal(signal.SIGKILL)
    said = ended(process)
    assert "continues without process 2" in said
    assert "starting it again" in said
    (run,) = find_runs(tmp_path)
    assert run.status == "finished"
    assert torch.isfinite(rows(tmp_path)["x"]).all()
    assert run.records()[-1]["accuracy_worst"] > 0.8
    (whole,) = find_runs(tmp_path / "whole")
    tested = [record for record in whole.records() if record["epoch"] > 10 and "accuracy" in record]
    usual = [record["consensus_distance"] for record in tested]
    assert run.records()[-1]["consensus_distance"] < max(usual), "not further apart than in a run without faults"
    assert max(usual) < 1e-4, "26 without communication"


@pytest.mark.slow
def test_an_exact_mean_stops_without_anybody_and_resumes(tmp_path):
    words = ["--topology", "ring:3", "--epochs", "40", "--algorithm", "slowmo"]
    process = train(tmp_path, *words, "--engine", "distributed", "--processes", "3", "--peer-timeout", "5")
    wait_for_epoch(tmp_path, 1, 4)
    rank(process, 1).send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "an exact mean over all nodes lost a process and cannot continue" in said
    ended(train(tmp_path, *words))
    (run,) = find_runs(tmp_path)
    assert run.records()[-1]["epoch"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("all_are_killed", [False, True])
def test_an_exact_mean_resumes_at_a_rendezvous_that_stayed(tmp_path, all_are_killed):
    words = ["--topology", "ring:3", "--epochs", "40", "--precision", "fp64", "--milestones", "--algorithm", "slowmo"]
    words += ["--peer-timeout", "5", "--checkpoint-seconds", "0"]
    server = serve("127.0.0.1", 0)
    started = train_apart(tmp_path, server.port, 3, *words)
    wait_for_epoch(tmp_path, 1, 4)
    for process in started if all_are_killed else started[1:2]:
        process.kill()
    said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    if not all_are_killed:
        assert [process.returncode for process in started] == [2, -9, 2]
        assert all("an exact mean over all nodes lost a process" in said[rank] for rank in (0, 2))
    again = time.time()
    for process in train_apart(tmp_path, server.port, 3, *words):
        ended(process)
    measured = [json.loads(line) for line in next(tmp_path.glob("*/parts/0/metrics.jsonl")).read_text().splitlines()]
    assert [found["epoch"] for found in measured] == [*range(1, 41)]
    assert measured[0]["written"] < again < measured[-1]["written"], "it resumed, and did not begin anew"
    (run,) = find_runs(tmp_path)
    simulate(run.experiment, Options(runs=tmp_path / "simulated", device="cpu"))
    assert same(rows(tmp_path), rows(tmp_path / "simulated"), 1e-8)     # 6e-10 in a run that was not interrupted


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dsgdm-n", "qg-dsgdm-n"])
def test_float32_accuracies_agree_after_50_steps(tmp_path, algorithm):
    words = ["--topology", "ring:8", "--algorithm", algorithm, "--epochs", "1", "--steps", "50"]
    ended(train(tmp_path / "here", *words))
    ended(train(tmp_path / "there", *words, "--engine", "distributed", "--processes", "2"))
    (here,), (there,) = find_runs(tmp_path / "here"), find_runs(tmp_path / "there")
    for name in ("accuracy", "accuracy_worst", "accuracy_averaged"):
        assert there.records()[-1][name] == pytest.approx(here.records()[-1][name], abs=1.5 / 360)    # about one image


@pytest.mark.slow
def test_a_process_that_hangs_is_missed_and_comes_back(tmp_path):
    process = train(tmp_path, *LONG)
    wait_for_epoch(tmp_path, 2, 4)
    victim = rank(process, 2)
    victim.suspend()
    time.sleep(10)
    victim.resume()
    said = ended(process)
    assert "continues without process 2" in said
    (run,) = find_runs(tmp_path)
    assert run.status == "finished"
    assert run.records()[-1]["accuracy_worst"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "importing", "training"])
def test_sigterm_to_the_command_saves_and_ends_all_processes(tmp_path, when):
    process = train(tmp_path, *LONG, "--epochs", "3000")
    command = psutil.Process(process.pid)
    wait_for(lambda: len(command.children()) >= (2 if when == "starting" else 4))
    if when == "importing":
        time.sleep(1)
    if when == "training":
        wait_for_epoch(tmp_path, 2, 4)
    children = command.children()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert said.endswith("qg: stopped; run the same command again to resume\n")
    assert len([line for line in said.splitlines() if line.startswith("qg:")]) == 1
    _, alive = psutil.wait_procs(children, timeout=1)
    assert not alive, "orphans"
    if when == "training":
        saved = {path.name for path in tmp_path.glob("*/parts/*/checkpoint/*.json")}
        assert len(saved) == 1
        assert len(list(tmp_path.glob("*/parts/*/checkpoint/*.json"))) == 4


@pytest.mark.slow
def test_twenty_processes_on_few_cores_start(tmp_path):
    words = ["--topology", "ring:200", "--epochs", "2", "--steps", "3"]
    ended(train(tmp_path, *words, "--engine", "distributed", "--processes", "20"))
    (run,) = find_runs(tmp_path)
    assert [record["epoch"] for record in run.records()] == [1, 2]
    edges = [json.loads(path.read_text())["edges"] for path in run.folder.glob("parts/*/summary.json")]
    assert len(edges) == 20
    assert all(edge["missed"] == 0 for of in edges for edge in of.values())


@pytest.mark.slow
def test_damaged_checkpoints_of_a_process_are_passed_over_by_all(tmp_path, simulated):
    words = [*EXACT, "--checkpoint-seconds", "0", "--engine", "distributed", "--processes", "2"]
    ended(train(tmp_path, *words))
    (run,) = find_runs(tmp_path)
    (run.folder / "summary.json").unlink()
    for path in (run.folder / "checkpoint").iterdir():
        path.unlink()
    older, newer = ((run.folder / "parts" / "1" / "checkpoint" / f"{epoch:06d}.safetensors") for epoch in (5, 6))
    whole = older.read_bytes()
    for path in (older, newer):
        path.write_bytes(whole[:1000])
    before = (run.folder / "parts" / "0" / "metrics.jsonl").read_bytes()
    refused = train(tmp_path, *words)
    said, _ = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 2
    (line,) = [line for line in said.splitlines() if line.startswith("qg: ")]
    assert line == (
        f"qg: no epoch has an intact checkpoint in {older.parent}; restore the folder from a backup, or move it "
        "elsewhere to train anew"
    )
    assert (run.folder / "parts" / "0" / "metrics.jsonl").read_bytes() == before
    older.write_bytes(whole)
    said = ended(train(tmp_path, *words))
    assert said.count(f"checkpoint {newer} is damaged (its checksum is wrong); using an older one") == 1
    assert newer.with_name("000006.damaged.safetensors").read_bytes() == whole[:1000]
    assert same(rows(tmp_path), rows(simulated), 1e-11)
