"""The run folder of a site: modes, damaged checkpoints, other data, and what a kill leaves of its audit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import wait_for
from federations import Sites

from quasiglobal.peers.audit import Story, Trail
from quasiglobal.runs.store import find_runs

IMPATIENT = (str(Path(__file__).parent / "impatient.py"),)


def modes(folder):
    """The modes of a folder, of its folders and of its files."""
    found = [path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()]
    return {folder.stat().st_mode & 0o777}, set(found), {
        path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_dir()
    }


def asked(folder, *words):
    """What `qg site audit` answers."""
    done = subprocess.run(
        [sys.executable, "-m", "quasiglobal", "site", "audit", *map(str, words)], capture_output=True, text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_killed_site_resumes_from_the_older_checkpoint_and_its_record_tells_all(tmp_path, owners, monkeypatch):
    monkeypatch.setenv("PAUSE", "0.05")
    four, sites = owners(epochs=200), Sites(tmp_path, "complete:2", 2)
    toml = tmp_path / "experiment.toml"
    toml.write_text(toml.read_text().replace("ring:4", "complete:2"))
    words = ["--peer-timeout", "8", "--checkpoint-seconds", "0"]
    old = os.umask(0o022)                                   # the usual one
    try:
        nodes = [four.join(k, sites.folders[k], *words, program=IMPATIENT) for k in range(2)]
        wait_for(lambda: any(path.stem >= "000020" for path in tmp_path.glob("runs1/*/parts/1/checkpoint/*.json")))
    finally:
        os.umask(old)
    nodes[1].kill()
    nodes[1].wait()
    (folder,) = (tmp_path / "runs1").glob("*")
    assert modes(folder) == ({0o700}, {0o600}, {0o700})
    audit = folder / "audit.jsonl"
    (killed,) = Story(Trail.read(audit).lines).connections
    assert killed["end"] is None
    assert killed["sent"] > 10 * 5 * 8 * 20_000             # of ten epochs at least

    newest = sorted((folder / "parts/1/checkpoint").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    left = newest.read_bytes()
    folder.chmod(0o755)
    newest.chmod(0o644)
    with open(audit, "ab") as file:
        file.write(b'{"time": "20')
    with np.load(tmp_path / "1.npz") as data:
        np.savez(tmp_path / "1.npz", **{name: data[name][: -10 if name in "xy" else None] for name in data})
    four.log(1).unlink()
    nodes[1] = four.join(1, sites.folders[1], *words, program=IMPATIENT)
    said = [four.said(process, k) for k, process in enumerate(nodes)][1]
    name = Path("runs1", folder.name, "parts/1/checkpoint", newest.name)
    assert said.count(f"checkpoint {name} is damaged (its checksum is wrong); using an older one") == 1
    assert said.count("had mode 755, so others could read this site's models; it has mode 700 now") == 1
    assert said.count("the data changed since the last start (fingerprint ") == 1
    assert newest.with_name(f"{newest.stem}.damaged.safetensors").read_bytes() == left
    assert modes(folder) == ({0o700}, {0o600}, {0o700})
    runs = [next(find_runs(tmp_path / f"runs{k}")) for k in range(2)]
    assert [run.status for run in runs] == ["finished", "finished"]
    assert [len(run.summary.data) for run in runs] == [1, 2]
    first, second = runs[1].summary.data
    assert first["epoch"] == 0 < second["epoch"]
    assert first["fingerprint"] != second["fingerprint"]

    told = json.loads(asked(tmp_path, folder, "--json"))
    assert (told["breaks"], len(told["torn"])) == ([], 1)
    assert [one["end"] for one in told["processes"]] == [None, "finished"]
    assert [one["data"] for one in told["processes"]] == [first["fingerprint"], second["fingerprint"]]
    assert {one["key"] for one in told["processes"]} == {sites.folders[1].own().fingerprint}
    assert {one["experiment"] for one in told["processes"]} == {runs[1].experiment.hash}
    for one in told["connections"]:
        assert one["key"] == sites.folders[0].own().fingerprint
        assert one["address"] == one["dialled"] == sites.addresses[0]
    for line in Trail.read(tmp_path / "runs0" / folder.name / "audit.jsonl").lines:
        if line["event"] == "connected":                    # this side listens
            assert line["address"].startswith("127.0.0.1:")
            assert line["address"] != sites.addresses[1]
            assert line["dialled"] is None
    said = asked(tmp_path, f"runs1/{folder.name}", "--hash", told["last_hash"])
    assert "all lines up to it are as they were then" in said


@pytest.mark.slow
def test_a_site_without_an_intact_checkpoint_says_so_and_touches_nothing(tmp_path, owners):
    four, sites = owners(epochs=2), Sites(tmp_path, "complete:2", 2)
    toml = tmp_path / "experiment.toml"
    toml.write_text(toml.read_text().replace("ring:4", "complete:2"))
    for k, process in enumerate([four.join(k, sites.folders[k], "--linger", "0") for k in range(2)]):
        four.said(process, k)
    (folder,) = (tmp_path / "runs1").glob("*")
    (folder / "summary.json").unlink()
    place = folder / "parts/1/checkpoint"
    for path in place.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    four.log(1).unlink()
    said = four.said(four.join(1, sites.folders[1]), 1, status=2)
    assert said == (
        f"qg: no epoch has an intact checkpoint in {place.relative_to(tmp_path)}; restore the folder from a backup, or "
        "move it elsewhere to train anew\n"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_stopped_site_records_that_it_stopped(tmp_path, owners, monkeypatch):
    monkeypatch.setenv("PAUSE", "0.2")
    four, sites = owners(epochs=1000), Sites(tmp_path, "complete:2", 2)
    toml = tmp_path / "experiment.toml"
    toml.write_text(toml.read_text().replace("ring:4", "complete:2"))
    nodes = [four.join(k, sites.folders[k], program=IMPATIENT) for k in range(2)]
    wait_for(lambda: list(tmp_path.glob("runs1/*/parts/1/metrics.jsonl")))
    nodes[1].send_signal(signal.SIGINT)
    four.said(nodes[1], 1, status=130)
    (folder,) = (tmp_path / "runs1").glob("*")
    story = Story(Trail.read(folder / "audit.jsonl").lines)
    assert [one["end"] for one in story.processes] == ["stopped"]
    assert [one["end"] for one in story.connections] == ["closed"]
