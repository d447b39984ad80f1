"""Run folders: contents, and resume after stops, kills and damage."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from small_runs import CPU, SHORT, Stop, assert_same_run, final, settled, stop_at

import quasiglobal as qg
from later_methods import TWINS
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.common import files
from quasiglobal.data.sources import load
from quasiglobal.runs import checkpoints
from quasiglobal.runs.best import best_state, kept_in
from quasiglobal.runs.building import make_task
from quasiglobal.runs.checkpoints import Part, joined_checkpoint
from quasiglobal.runs.export import export
from quasiglobal.runs.local import simulate
from quasiglobal.runs.store import RunFolder, find_runs, read_run
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program
from quasiglobal.training.rows import Checkpoint


def test_a_run_is_a_folder_and_is_not_run_twice(tmp_path):
    (run,) = simulate(SHORT, settled(tmp_path))
    assert {path.name for path in run.folder.iterdir()} == {
        "experiment.json", "metrics.jsonl", "summary.json", "checkpoint"}
    assert run.status == "finished"
    assert len(run.records()) == 3
    assert run.summary.last == run.records()[-1]
    assert run.summary.best["accuracy"] == max(record["accuracy"] for record in run.records())
    assert read_run(run.folder).experiment == SHORT
    stamp = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    simulate(SHORT, settled(tmp_path))
    assert (run.folder / "metrics.jsonl").stat().st_mtime_ns == stamp


def test_the_best_models_are_kept_also_over_a_stop(tmp_path):
    setting = replace(SHORT, epochs=5, lr=0.4)
    (whole,) = simulate(setting, settled(tmp_path / "whole", keep_best=True))
    for epoch in (2, 4):                                    # after its best models are written, before its checkpoint
        with pytest.raises(Stop):
            simulate(setting, settled(tmp_path, keep_best=True), stop_at(epoch))
    (run,) = simulate(setting, settled(tmp_path, keep_best=True))
    assert kept_in(run.folder) == kept_in(whole.folder)
    assert run.summary.kept == [asdict(one) for one in kept_in(run.folder)]
    for one in kept_in(run.folder):
        scores = [record["accuracy_nodes"][one.node] for record in run.records()]
        assert one.value == max(scores) == scores[one.epoch - 1]
        best = export(run, str(one.node), best=True)
        assert best.state.keys() == export(run, str(one.node)).state.keys()
        assert all(value.equal(best_state(whole.folder, str(one.node))[name]) for name, value in best.state.items())
    right = best.outputs(load("digits")).argmax(dim=1) == load("digits").test.y
    assert float(right.double().mean()) == pytest.approx(one.value)
    with pytest.raises(qg.InputError, match="no best model of node 7; it has those of 0, 1, 2, 3"):
        best_state(run.folder, "7")


@pytest.mark.filterwarnings("ignore:D2 needs")
def test_what_an_algorithm_keeps_can_be_saved_and_loaded(tmp_path):
    """Includes a shared tensor: slowmo's x and x0 are the same tensor after an outer step."""
    names = sorted(["slowmo:tau=1", *(name for name in ALGORITHMS if name not in TWINS)])   # the row order of `train`
    graphs = {name: "star:5" if name == "relaysgd" else "ring:5" for name in names}
    experiments = [replace(SHORT, algorithm=name, topology=graphs[name], partition="iid", epochs=1) for name in names]
    runs = simulate(experiments, settled(tmp_path))
    program = Program(make_task(SHORT, load("digits")), experiments, CPU)
    Loop(program).run()
    for k, (name, run) in enumerate(zip(names, runs, strict=True)):
        saved = final(run)
        assert set(saved) == set(program.rows_of(k))
        assert all(saved[tensor].equal(value) for tensor, value in program.rows_of(k).items()), name


def test_a_record_has_the_promised_measures(tmp_path):
    (run,) = simulate(SHORT, settled(tmp_path))
    record = run.records()[-1]
    for name in ("loss", "train_accuracy", "accuracy", "accuracy_std", "accuracy_worst", "accuracy_best",
                 "accuracy_averaged", "consensus_distance", "weight_norm", "effective_step", "images_per_second"):
        assert np.isfinite(record[name]), name
    assert record["accuracy_worst"] <= record["accuracy"] <= record["accuracy_best"]
    counts = torch.bincount(load("digits").test.y)
    answers = (torch.tensor(record["recall_worst"]) * counts).sum()
    assert float(answers / counts.sum()) == pytest.approx(record["accuracy_worst"], rel=1e-6)
    parameters = run.summary.parameters
    assert record["bytes_sent"] == 2 * 4 * parameters * record["step"]
    assert record["effective_step"] == pytest.approx(record["lr"] / record["weight_norm"] ** 2, rel=1e-2)


SEVERAL = pytest.param(["d2+", "slowmo:tau=5", "dadam", "mimelite:tau=2"], marks=pytest.mark.slow)


@pytest.mark.parametrize("algorithms", [["qg-dsgdm-n"], SEVERAL], ids=str)
def test_stopped_runs_go_on_bit_for_bit(tmp_path, algorithms):
    """A single run, and several runs as rows of one program."""
    alike = replace(SHORT, topology="lazy/ring:4", lr=0.01, model="cnn", norm="bn", epochs=4)
    experiments = [replace(alike, algorithm=name) for name in algorithms]
    whole = simulate(experiments, settled(tmp_path / "whole"))
    with pytest.raises(Stop):
        simulate(experiments, settled(tmp_path / "cut"), stop_at(2))
    for one, other in zip(whole, simulate(experiments, settled(tmp_path / "cut")), strict=True):
        assert_same_run(one, other)


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
"""One thread, as in this suite: threads change the order of sums."""


def train_and_kill(folder, algorithm, kills, epochs):
    """Kill -9 a training repeatedly at random times, then finish it; compare it with an uninterrupted run."""
    words = ["--model", "mlp", "--topology", "ring:5", "--partition", "iid", "--lr", "0.02", "--eval-every", "5"]
    words += ["--epochs", str(epochs), "--algorithm", algorithm, "--checkpoint-seconds", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "quasiglobal", "train", *words]
    moments = random.Random(0)
    for kill in range(kills):
        process = subprocess.Popen([*command, "--runs", str(folder / "cut")], stdout=subprocess.DEVNULL, env=ONE_THREAD)
        before = set((folder / "cut").glob("*/checkpoint/*.json"))
        deadline = time.monotonic() + (moments.uniform(0, 4) if kill % 4 == 3 else 60)
        while set((folder / "cut").glob("*/checkpoint/*.json")) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        assert process.poll() is None, "the training ended before the kill"
        process.send_signal(signal.SIGKILL)
        process.wait()
    (killed,) = find_runs(folder / "cut")
    (cut,), (whole,) = (simulate(killed.experiment, settled(folder / place)) for place in ("cut", "whole"))
    assert_same_run(whole, cut)


def test_a_kill_changes_nothing(tmp_path):
    train_and_kill(tmp_path, "qg-dsgdm-n", kills=1, epochs=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    ["dsgdm-n", "qg-dsgdm-n:tau=3", "qg-dadam", "d2+", "dsgdm-n-gt", "dmsgd", "slowmo:tau=5", "mimelite", "sgdm-n"],
)
def test_twenty_kills_change_nothing(tmp_path, algorithm):
    train_and_kill(tmp_path, algorithm, kills=20, epochs=400)


def test_ctrl_c_saves_the_epoch_and_says_how_to_go_on(tmp_path):
    words = ["--model", "mlp", "--topology", "ring:4", "--epochs", "400", "--lr", "0.05", "--eval-every", "400"]
    command = [sys.executable, "-m", "quasiglobal", "train", *words, "--device", "cpu", "--runs", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(p.stat().st_size for p in tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "qg: stopped; run the same command again to resume\n"
    (run,) = find_runs(tmp_path)
    assert checkpoints.newest(run.folder / "checkpoint").epochs == len(run.records()) > 0


def test_seeds_that_stopped_at_different_epochs_all_finish(tmp_path):
    with pytest.raises(Stop):
        simulate(SHORT, settled(tmp_path), stop_at(1))
    runs = simulate(SHORT, settled(tmp_path, seeds=2))
    assert [run.status for run in runs] == ["finished", "finished"]
    (alone,) = simulate(SHORT.with_seed(1), settled(tmp_path / "alone"))
    assert runs[1].summary.last["accuracy"] == pytest.approx(alone.summary.last["accuracy"], abs=0.02)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_falls_back_and_says_so(tmp_path, damage, caplog):
    experiment = replace(SHORT, epochs=4)
    (whole,) = simulate(experiment, settled(tmp_path / "whole"))

    with pytest.raises(Stop):
        simulate(experiment, settled(tmp_path / "cut"), stop_at(3))
    (folder,) = (tmp_path / "cut").glob("*/checkpoint")
    newest = sorted(folder.glob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    if damage == "truncate":
        del content[-100:]
    content[len(content) // 2] ^= damage == "flip"
    newest.write_bytes(content)
    if damage == "remove":
        newest.unlink()
    (cut,) = simulate(experiment, settled(tmp_path / "cut"))
    assert caplog.text.count("is damaged (") == caplog.text.count("; using an older one") == 1
    assert_same_run(whole, cut)
    assert json.loads(newest.with_name(f"{newest.stem}.damaged.json").read_text())["epochs"] == int(newest.stem)
    if damage != "remove":
        assert newest.with_name(f"{newest.stem}.damaged.safetensors").read_bytes() == content


def test_without_an_intact_checkpoint_nothing_is_trained_or_deleted(tmp_path):
    with pytest.raises(Stop):
        simulate(SHORT, settled(tmp_path), stop_at(2))
    folder = RunFolder.of(SHORT, tmp_path).folder
    for path in folder.glob("checkpoint/*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    sentence = f"no epoch has an intact checkpoint in {folder}/checkpoint; restore the folder from a backup, or move it"
    with pytest.raises(qg.InputError, match=re.escape(sentence)):
        simulate(SHORT, settled(tmp_path))
    with pytest.raises(qg.InputError, match=re.escape(sentence)):
        read_run(folder).rows()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (folder / "checkpoint").rename(tmp_path / "elsewhere")
    (run,) = simulate(SHORT, settled(tmp_path))
    assert run.status == "finished"


def test_only_two_checkpoints_are_kept(tmp_path):
    (run,) = simulate(SHORT, settled(tmp_path))
    assert sorted(path.name for path in (run.folder / "checkpoint").iterdir()) == [
        "000002.json", "000002.safetensors", "000003.json", "000003.safetensors"]


def test_a_diverged_seed_ends_cleanly(tmp_path):
    runs = simulate(replace(SHORT, lr=1e18, algorithm="dsgd"), settled(tmp_path, seeds=2))
    assert [run.status for run in runs] == ["diverged", "diverged"]
    assert runs[0].records()[-1]["loss"] is None or runs[0].records()[-1]["loss"] > 1e4


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    (run,) = simulate(replace(SHORT, epochs=2), settled(tmp_path))
    before = final(run)

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(qg.InputError, match="No space left on device"):
        RunFolder.of(run.experiment, tmp_path).save(Checkpoint(before, 3))
    assert all(final(run)[name].equal(before[name]) for name in before)
    assert not list((run.folder / "checkpoint").glob(".*"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files")
def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    words = f"train --model mlp --topology ring:4 --epochs 2 --device cpu --runs {tmp_path / 'runs'}"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 400; exec {sys.executable} -m quasiglobal {words}"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("qg: cannot write ")
    assert len(done.stderr.splitlines()) == 1
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".") or "safetensors" in path.name]


def test_what_a_killed_process_left_half_written_is_passed_over(tmp_path):
    rows = {"x": torch.zeros(2, 3)}
    checkpoints.save(tmp_path, Checkpoint(rows, 1))
    for name in (".000002.17.json", ".000002.17.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    assert checkpoints.epochs(tmp_path) == [1]
    found = checkpoints.newest(tmp_path)
    assert found is not None
    assert found.epochs == 1
    checkpoints.save(tmp_path, Checkpoint(rows, 2))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["000001", "000001", "000002", "000002"]


@pytest.mark.parametrize(("name", "text"), [("000002", "[" * 100_000), ("²", "{}"), ("000003", "[]")])
def test_a_note_that_is_no_checkpoints_is_passed_over(tmp_path, name, text):
    checkpoints.save(tmp_path, Checkpoint({"x": torch.zeros(2, 3)}, 1))
    (tmp_path / f"{name}.json").write_text(text)
    found = checkpoints.newest(tmp_path)
    assert found is not None
    assert (found.epochs, checkpoints.intact(tmp_path)) == (1, {1})


def test_a_later_checkpoint_of_a_process_does_not_push_out_the_common_ones(tmp_path):
    """As of a process that had saved when another was killed: all resume from an earlier epoch."""
    parts = [Part(tmp_path, k, [k]) for k in range(2)]
    for part, epoch in ((parts[0], 20), (parts[1], 20), (parts[0], 40), (parts[0], 25), (parts[1], 25), (parts[0], 30)):
        part.save(Checkpoint({"x": torch.zeros(1, 3)}, epoch))
    assert [part.epochs() for part in parts] == [{0, 25, 30, 40}, {0, 20, 25}]
    assert joined_checkpoint(parts).epochs == 25
    (tmp_path / "parts/1/checkpoint/000025.safetensors").unlink()
    with pytest.raises(qg.InputError, match=r"no epoch has an intact checkpoint in .*/parts; restore the folder"):
        joined_checkpoint(parts)


def test_a_checkpoint_returns_all_its_fields_and_older_files_give_the_defaults_of_later_ones(tmp_path):
    added = {field.name: field for field in fields(Checkpoint) if field.name != "rows"}
    values = {
        name: {"int": 4 + k, "float": k / 2, "str": f"text {k}"}[field.type]
        for k, (name, field) in enumerate(added.items())
    }
    checkpoints.save(tmp_path, Checkpoint({"x": torch.ones(2, 3)}, **values))
    for saved in (checkpoints.newest(tmp_path), checkpoints.at(tmp_path, 4)):
        assert {name: getattr(saved, name) for name in values} == values
        assert saved.rows["x"].equal(torch.ones(2, 3))
    note = tmp_path / "000004.json"
    note.write_text(json.dumps({name: value for name, value in json.loads(note.read_text()).items() if name in OLDEST}))
    older = checkpoints.newest(tmp_path)
    assert all(getattr(older, name) == field.default for name, field in added.items() if name not in OLDEST)


OLDEST = ("epochs", "metrics", "sha256")
"""The entries that files of all versions have."""


def test_a_lost_or_damaged_file_costs_no_run(tmp_path):
    """Lost files are rebuilt where possible; warnings name the damaged files."""
    options = settled(tmp_path, checkpoint_seconds=0.0)

    with pytest.raises(KeyboardInterrupt):
        simulate(SHORT, options, stop_at(2, KeyboardInterrupt))
    folder = RunFolder.of(SHORT, tmp_path).folder
    (folder / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match="lost records"):
        (run,) = simulate(SHORT, options)
    assert [record["epoch"] for record in run.records()] == [2, 3]
    (folder / "summary.json").write_text("")
    with pytest.warns(UserWarning, match="summary.json is damaged"):
        (run,) = simulate(SHORT, options)
    assert run.status == "finished"
    (folder / "experiment.json").unlink()
    simulate(SHORT, options)
    assert [found.experiment for found in find_runs(tmp_path)] == [SHORT]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("{\n")
    with pytest.warns(UserWarning, match="line 3 of"):
        assert len(read_run(folder).records()) == 2
    (folder / "experiment.json").write_text("[1]")
    with pytest.warns(UserWarning, match="skipped"):
        assert list(find_runs(tmp_path)) == []


def test_two_processes_do_not_train_one_run(tmp_path):
    with files.alone(RunFolder.of(SHORT, tmp_path).folder), pytest.raises(qg.InputError, match="another process"):
        simulate(SHORT, settled(tmp_path))


def test_a_graph_that_has_changed_is_refused(tmp_path):
    graph, other = tmp_path / "graph", "0 1\n1 2\n2 3\n"
    graph.write_text("0 1\n1 2\n2 3\n3 0\n")
    experiment = replace(SHORT, topology=f"lazy/file:{graph}")
    options = settled(tmp_path / "runs")
    with pytest.raises(Stop):
        simulate(experiment, options, stop_at(2))
    before, _ = graph.read_text(), graph.write_text(other)
    with pytest.raises(qg.InputError, match=r"is another graph than .* was trained on; restore that graph"):
        simulate(experiment, options)
    graph.write_text(f"# the same\n{before}")
    (run,) = simulate(experiment, options)
    assert run.status == "finished"
    graph.write_text(other)
    with pytest.raises(qg.InputError, match="is another graph"):
        simulate(experiment, options)
