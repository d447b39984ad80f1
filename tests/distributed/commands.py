"""`qg train --engine distributed` as a user starts it, and its processes by their rank."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

PATIENCE = 300
"""Seconds: on a busy machine starting some processes takes minutes."""

WORDS = ["--model", "mlp", "--lr", "0.05", "--alpha", "1", "--eval-every", "10", "--device", "cpu"]


def train(folder, *words, **options):
    command = [sys.executable, "-m", "quasiglobal", "train", *WORDS, "--runs", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def ended(process, seconds=PATIENCE):
    """All that a command said, once it is over."""
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said


def rank(process, wanted):
    """The child of a launcher with this rank."""
    for child in psutil.Process(process.pid).children():
        if child.environ().get("RANK") == str(wanted):
            return child
    raise AssertionError(f"no process of rank {wanted}")


def wait_for_epoch(folder, process, epoch, seconds=PATIENCE):
    """Until a part has measured this many epochs."""

    def reached():
        files = Path(folder).glob(f"*/parts/{process}/metrics.jsonl")
        return any(len(path.read_text().splitlines()) >= epoch for path in files)

    wait_for(reached, seconds)


def wait_for(condition, seconds=PATIENCE):
    """Until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
