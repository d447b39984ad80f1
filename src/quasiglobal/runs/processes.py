"""A run spread over processes, on one machine or several: who trains which nodes, and what they leave in its folder.

Process p writes what it measures and saves into parts/p/ of the run's folder; when all are done, process 0 puts the
parts together, and the run looks as if the simulator had made it. What either engine saved, the other goes on from.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quasiglobal.engines.distributed.engine import Distributed, spread
from quasiglobal.engines.distributed.gloo import Meeting, Store
from quasiglobal.engines.distributed.rendezvous import join, serve, told
from quasiglobal.engines.simulator import Simulator
from quasiglobal.errors import InputError
from quasiglobal.runs.local import Options, Run, Watcher, choose_device, data_of, facts, make_task, runs_of
from quasiglobal.runs.parts import Part, newest, records_of
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import combined
from quasiglobal.training.program import Training, diverged
from quasiglobal.training.program import epochs as every_epoch


def launch(words: Sequence[str], processes: int) -> int:
    """Run `qg` with these words in so many processes here; the exit status of the first that fails."""
    server = serve("127.0.0.1", 0)
    shared = {
        "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }

    def start(rank: int) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen(
            [sys.executable, "-m", "quasiglobal", *words], env=os.environ | shared | own,
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )

    running = {rank: start(rank) for rank in range(processes)}
    restarts, failed = 3, 0
    try:
        while running:
            for rank, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                if code < 0 and restarts and len(running) > 1:  # killed: the others go on, and it comes back to them
                    restarts -= 1
                    print(f"qg: process {rank} was killed (signal {-code}); starting it again", file=sys.stderr)
                    running[rank] = start(rank)
                    continue
                del running[rank]
                failed = failed or code
            time.sleep(0.05)
    except KeyboardInterrupt:                                   # they heard it too
        failed = 130
        for process in running.values():
            process.wait()
    return failed


def refuse_faults(experiment: Experiment) -> None:
    """Faults between processes are real ones."""
    if experiment.drop or experiment.churn:
        raise InputError(
            "drop and churn are simulated, but processes lose what they lose; use --engine simulator or leave both at 0"
        )


def train(experiment: Experiment, options: Options, watch: Watcher = lambda runs, records: None) -> list[Run]:
    """This process's share of what is not finished of an experiment's seeds; all its runs."""
    refuse_faults(experiment)
    patience = max(options.peer_timeout, GRACE)
    meeting, rank, size = join(patience)
    store = Meeting(meeting, experiment.hash)
    runs = runs_of(experiment, options)
    going = [run for run in runs if run.summary is None]
    if not going:
        return runs
    hosted = spread(parse(experiment.topology).n, size)
    task = make_task(experiment, data_of(experiment, options.data_dir))
    experiments, device = [run.experiment for run in going], choose_device(options.device)

    def training_on(engine: Callable[..., Any]) -> Training:
        return Training(task, experiments, device, engine, options.recompute)

    parts = [Part(run.folder, rank, hosted[rank]) for run in going]
    saved = set.intersection(*(part.epochs() for part in parts))
    training = training_on(
        partial(
            Distributed, store=store, rank=rank, hosted=hosted, timeout=options.peer_timeout, host=options.host,
            experiment=experiment.hash,
        )
    )
    training.warm_up()
    engine = training.engine
    assert isinstance(engine, Distributed)
    came_back = store.add(f"starts/{rank}", 1) > 1
    engine.connect(patience=patience)
    if came_back or engine.step_of_others:
        rejoin(training, engine, parts, max(saved))
    elif epoch := _agreed(store, rank, size, saved, patience):
        training.restore([part.load(epoch) for part in parts], epoch)
    take_part(training, engine, going, parts, watch)
    everybody = [[Part(run.folder, p, nodes) for p, nodes in enumerate(hosted)] for run in going]
    missing = _missing(everybody, patience)                     # one that was away may still come back to us
    engine.close()
    if rank == 0:
        if missing:
            folders = ", ".join(str(part.folder) for part in missing)
            raise InputError(f"there is no end of {folders}; run the same command again to go on")
        _put_together(going, everybody, training_on(Simulator))
    return runs


def take_part(
    training: Training, engine: Distributed, runs: Sequence[Run], parts: Sequence[Part], watch: Watcher
) -> None:
    """Train the nodes here to the end, with the others; what is measured and saved goes into the parts."""
    for run, part in zip(runs, parts, strict=True):
        run.describe()
        part.begin(training.epochs_done)
    failed = False
    if training.epochs_done == training.experiment.epochs:
        for k, part in enumerate(parts):
            part.save(training.rows_of(k), training.epochs_done)
    for measures in every_epoch(training):
        records = [combined([found]) for found in measures]
        for k, part in enumerate(parts):
            now = {"lost": engine.lost, "edges": engine.accounts(), "written": time.time()}
            part.write(measures[k] | now)
            part.save(training.rows_of(k), training.epochs_done)
        watch(runs, records)
        failed = any(diverged(record) for record in records)
        if failed:
            break
    for part in parts:
        part.finish("diverged" if failed else "finished", engine.accounts())


GRACE = 60.0
"""Seconds, at least, that processes wait for the others at the start and at the end."""

PATIENCE = 5
"""Epochs that a returning node's own model may be behind; an older one gives way to its neighbours' mean."""


def rejoin(training: Training, engine: Distributed, parts: Sequence[Part], saved: int) -> None:
    """Go on with the others, from their next epoch: with the models left here, or with the neighbours' mean."""
    theirs = math.ceil(engine.step_of_others / training.steps_per_epoch)
    epoch = max(saved, min(theirs, training.experiment.epochs))
    if saved:
        training.restore([part.load(saved) for part in parts], epoch)
    model = engine.mean_of_neighbours(training.x)
    if model is not None and epoch - saved > PATIENCE:
        training.begin_at(model)
    training.epochs_done = epoch


def _agreed(store: Store, rank: int, size: int, epochs: set[int], timeout: float) -> int:
    """The latest epoch that every process can go on from, in all runs."""
    theirs = told(store, "epochs", json.dumps(sorted(epochs)), rank, size, timeout)
    common: set[int] = set.intersection(*(set(json.loads(found)) for found in theirs))
    return max(common)


def _missing(everybody: Sequence[Sequence[Part]], timeout: float) -> list[Part]:
    """Those that have not ended after so many seconds."""
    deadline = time.monotonic() + timeout
    while missing := [part for parts in everybody for part in parts if part.status is None]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return missing


def _put_together(runs: Sequence[Run], everybody: Sequence[Sequence[Part]], training: Training) -> None:
    """The runs as a whole: records, the last checkpoint, and what only all models together tell."""
    whole, epochs, _ = zip(*(newest(run.folder) for run in runs), strict=True)
    epoch = min(epochs)                             # 0 where some stopped early, because they diverged
    if epoch:
        training.restore(whole, epoch)
        measured = training.evaluate()
    for k, (run, parts) in enumerate(zip(runs, everybody, strict=True)):
        records = records_of(parts)
        if epoch:
            records[-1] |= {name: measured[k][name] for name in ("accuracy_averaged", "consensus_distance")}
        run.rewrite(records)
        if epoch:
            run.checkpoint(whole[k], epoch)
        ended = {part.status for part in parts}
        run.finish("diverged" if "diverged" in ended else "finished", facts(training, k))
