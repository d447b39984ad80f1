"""Start `qg train --engine distributed` as a user does, and find its processes by rank."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

PATIENCE = 300
"""Timeout in seconds: on a busy machine, starting processes takes minutes."""

WORDS = ["--model", "mlp", "--lr", "0.05", "--alpha", "1", "--eval-every", "10", "--device", "cpu"]


QG = ("-m", "quasiglobal")


def train(folder, *words, program=QG, **options):
    command = [sys.executable, *program, "train", *WORDS, "--runs", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def train_apart(folder, port, processes, *words, programs=None):
    """Start the processes one by one, as docs/deploy.md says, at a rendezvous that outlives them."""
    shared = os.environ | {
        "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }
    words = [*words, "--engine", "distributed"]
    return [
        train(folder, *words, program=program, env=shared | {"RANK": str(rank)})
        for rank, program in enumerate(programs or [QG] * processes)
    ]


def ended(process, seconds=PATIENCE):
    """Wait for a command to succeed; return its output."""
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said


def rank(process, wanted):
    """Return the launcher's child process with this rank."""
    for child in psutil.Process(process.pid).children():
        if child.environ().get("RANK") == str(wanted):
            return child
    raise AssertionError(f"no process of rank {wanted}")


def wait_for_epoch(folder, process, epoch, seconds=PATIENCE):
    """Wait until a process has recorded this many epochs."""

    def reached():
        files = Path(folder).glob(f"*/parts/{process}/metrics.jsonl")
        return any(len(path.read_text().splitlines()) >= epoch for path in files)

    wait_for(reached, seconds)


def wait_for(condition, seconds=PATIENCE):
    """Poll until the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)


def scalars(run, name):
    """Return the values of a metric in TensorBoard, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(name)}
