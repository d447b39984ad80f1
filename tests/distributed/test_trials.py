"""Two sites in trouble: a long pause, few descriptors and a flood, a full disk. Both finish in the end."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from commands import wait_for, wait_for_epoch
from federations import Sites

from quasiglobal.runs.store import find_runs

pytestmark = pytest.mark.slow

IMPATIENT = (str(Path(__file__).parent / "impatient.py"),)
WORDS = ["--checkpoint-seconds", "1", "--linger", "200"]


@pytest.fixture
def two(tmp_path, owners):
    """Factory of two of the owners, and their sites."""
    def make(epochs, eval_every=50):
        made, toml = owners(epochs=epochs), tmp_path / "experiment.toml"
        words = toml.read_text().replace("ring:4", "complete:2")
        toml.write_text(words.replace("eval_every = 50", f"eval_every = {eval_every}"))
        return made, Sites(tmp_path, "complete:2", 2)

    return make


def finished(folder, number, epochs):
    (run,) = find_runs(folder)
    assert run.status == "finished", number
    assert run.records()[-1]["epoch"] == epochs
    return run


def test_a_pause_of_ten_timeouts_is_made_up_for(tmp_path, two, monkeypatch):
    pair, sites = two(epochs=200)
    monkeypatch.setenv("PAUSE", "0.1")                      # on any machine the other still trains after the pause
    words = [*WORDS, "--peer-timeout", "1"]
    nodes = [pair.join(k, sites.folders[k], *words, program=IMPATIENT) for k in range(2)]
    wait_for_epoch(tmp_path / "runs0", 0, 5)
    os.kill(nodes[0].pid, signal.SIGSTOP)
    time.sleep(10)
    os.kill(nodes[0].pid, signal.SIGCONT)
    said = [pair.said(process, k) for k, process in enumerate(nodes)]
    assert "node 1 (site1) continues without node 0 (site0)" in said[1]
    for k in range(2):
        assert f"node {k} (site{k}) reconnected to node {1 - k} (site{1 - k})" in said[k]
        finished(tmp_path / f"runs{k}", k, 200)


@pytest.mark.skipif(not shutil.which("prlimit"), reason="the command prlimit (util-linux) is not installed")
def test_strangers_do_not_use_up_few_descriptors(tmp_path, two):
    pair, sites = two(epochs=300)
    few = ("prlimit", "--nofile=64:64")
    nodes = [
        pair.join(k, sites.folders[k], *WORDS, "--peer-timeout", "20", before=few if k == 0 else ()) for k in range(2)
    ]
    wait_for_epoch(tmp_path / "runs0", 0, 2)
    host, port = sites.addresses[0].split(":")
    held, most, until = [], 0, time.monotonic() + 10
    while time.monotonic() < until and nodes[0].poll() is None:
        try:
            held.append(socket.create_connection((host, int(port)), 0.5))
        except OSError:
            time.sleep(0.05)
        most = max(most, len(os.listdir(f"/proc/{nodes[0].pid}/fd")))
        while len(held) > 200:
            held.pop(0).close()
    for one in held:
        one.close()
    assert 12 < most < 60
    for k, process in enumerate(nodes):
        assert "Too many open files" not in pair.said(process, k)
        finished(tmp_path / f"runs{k}", k, 300)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_at_one_site_is_one_sentence_and_the_site_comes_back(tmp_path, two):
    pair, sites = two(epochs=600, eval_every=1)
    disk = tmp_path / "runs0"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        words = [*WORDS, "--peer-timeout", "5"]
        nodes = [pair.join(k, sites.folders[k], *words) for k in range(2)]
        said = pair.said(nodes[0], 0, status=2).splitlines()
        assert said[-1].startswith("qg: cannot write runs0/")
        assert "No space left on device" in said[-1]
        assert not any("Traceback" in line for line in said)
        wait_for(lambda: "node 1 (site1) continues without node 0 (site0)" in pair.log(1).read_text())
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        pair.said(pair.join(0, sites.folders[0], *words), 0)
        pair.said(nodes[1], 1)
        for k in range(2):
            run = finished(tmp_path / f"runs{k}", k, 600)
            assert [one["node"] for one in run.summary.kept] == [k]
    finally:
        pair.close()
        subprocess.run(["umount", "--lazy", disk])
