"""Run over processes under random faults, deterministic given the seed: killed and suspended processes, and damaged
checkpoints."""

import logging
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass

from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunFolder
from quasiglobal.training.experiment import Experiment

PROCESSES, EPOCHS, TIMEOUT = 4, 200, 2.0
PAUSE = 0.08
"""Seconds of sleep after each epoch, so that a run outlasts a process restart, however few processes still train."""

CHECKPOINT_SECONDS = 1.0
"""Interval of checkpoints, so that killed processes have some to resume from."""

GRAPHS = ("ring:4", "complete:4", "one-peer-exponential:4", "star:4", "ring:8", "torus:9")
METHODS = ("dsgd", "dsgdm-n", "qg-dsgdm-n", "qg-dsgdm-n:tau=2", "dsgdm-n-gt", "dadam", "qg-dadam")


@dataclass(frozen=True)
class Fault:
    """At `epoch`, process `victim` is suspended for `seconds`, or killed and restarted, with its newest checkpoint or
    with a truncated one."""

    epoch: int
    victim: int
    kind: str
    seconds: float


def schedule(seed):
    """Return an experiment and one to four faults in its first half, which leaves time to recover."""
    draw = random.Random(seed)
    experiment = Experiment(
        model="mlp", topology=draw.choice(GRAPHS), algorithm=draw.choice(METHODS), lr=0.02, alpha=1.0, warmup=0.0,
        epochs=EPOCHS, steps=5, eval_every=EPOCHS, seed=seed,
    )
    faults = [
        Fault(
            epoch=draw.randrange(EPOCHS // 2), victim=draw.randrange(PROCESSES),
            kind=draw.choice(["kill", "damage", "stop"]), seconds=draw.uniform(0.1, 5 * TIMEOUT),
        )
        for _ in range(draw.randint(1, 4))
    ]
    return experiment, sorted(faults, key=lambda fault: fault.epoch)


def take_part(rank, port, experiment, folder):
    """Run one process, as `qg train --engine distributed` does under torchrun."""
    import torch

    from quasiglobal.runs.distributed import train_over_processes

    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s")
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    options = Options(
        runs=folder, device="cpu", engine="distributed", peer_timeout=TIMEOUT, checkpoint_seconds=CHECKPOINT_SECONDS
    )
    train_over_processes(experiment, options, watch=lambda runs, records: time.sleep(PAUSE))


def survive(experiment, faults, folder, seconds=120):
    """Run the experiment with these faults; return the run after all exit with 0. No process outlives the call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quasiglobal.runs.distributed"])
    server = serve("127.0.0.1", 0)
    run = RunFolder.of(experiment, folder)

    def start(rank):
        process = context.Process(target=take_part, args=(rank, server.port, experiment, folder), daemon=True)
        process.start()
        return process

    deadline, running = time.monotonic() + seconds, [start(rank) for rank in range(PROCESSES)]
    held = {}
    waiting = list(faults)
    try:
        while any(process.is_alive() for process in running):
            assert time.monotonic() < deadline, f"processes {[p.is_alive() for p in running]} hang"
            now = time.monotonic()
            for rank, until in list(held.items()):
                if now >= until:
                    os.kill(running[rank].pid, signal.SIGCONT)
                    del held[rank]
            while waiting and epochs_done(run) >= waiting[0].epoch:
                fault = waiting.pop(0)
                victim = running[fault.victim]
                if not victim.is_alive():
                    continue
                if fault.kind == "stop":
                    os.kill(victim.pid, signal.SIGSTOP)
                    held[fault.victim] = now + fault.seconds
                    continue
                held.pop(fault.victim, None)
                victim.kill()
                victim.join()
                saved = sorted(run.folder.glob(f"parts/{fault.victim}/checkpoint/*[0-9].json"))
                if fault.kind == "damage" and len(saved) > 1:
                    os.truncate(saved[-1].with_suffix(".safetensors"), 1000)
                running[fault.victim] = start(fault.victim)
            time.sleep(0.01)
        assert [process.exitcode for process in running] == [0] * PROCESSES
    finally:
        for process in running:
            process.kill()
            process.join()
    return run.read()


def epochs_done(run):
    """Return the number of epochs that the furthest process has recorded."""
    files = run.folder.glob("parts/*/metrics.jsonl")
    return max((len(path.read_text().splitlines()) for path in files), default=0)
