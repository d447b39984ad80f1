"""Distributed training: the processes of one run (`qg train --engine distributed`), and their start on one machine.

Process p writes its measures and checkpoints into parts/p/ of the run folder. When all processes are done, process 0
combines the parts into the same files as the simulator's. Either engine resumes from the other's checkpoints.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TypeVar

from quasiglobal.errors import InputError
from quasiglobal.peers.rendezvous import Meeting, Store, all_gather, join, serve
from quasiglobal.runs.agreement import refuse_faults, trust_of
from quasiglobal.runs.assembly import Assembly, tidied
from quasiglobal.runs.building import task_of
from quasiglobal.runs.callbacks import TensorBoard
from quasiglobal.runs.options import Options
from quasiglobal.runs.participant import Participant, Seat, end_attempt, ending, needs_all, seat_in
from quasiglobal.runs.store import Run, Watcher, unchanged_folders, unwatched
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

GRACE = 60.0
"""Minimum timeout in seconds for processes to wait for each other at the start and at the end."""

_Value = TypeVar("_Value")

RESTARTS = 3
"""Maximum number of restarts of killed processes, over all processes."""


def train_over_processes(
    experiment: Experiment,
    options: Options,
    watch: Watcher = unwatched,
    task: Task | None = None,
    callbacks: Sequence[object] = (),
    wait: bool = False,
    temporary: bool = False,
) -> list[Run]:
    """Train this process's nodes in the unfinished runs of an experiment; return the runs of all seeds.

    `task` replaces the task that the experiment names. The user's `callbacks` run in process 0, on the records of all
    nodes; those with the attribute `everywhere` run in every process, on the records of its nodes. With `wait`, every
    process returns after process 0 has combined the parts. `temporary`: the caller deletes the run folders.
    """
    refuse_faults(experiment)
    options = replace(options, trust=trust_of(experiment, options.trust))
    patience = max(options.peer_timeout, GRACE)
    meeting, rank, size = join(patience)
    _check_alike(meeting, experiment, rank, size, patience)
    store, seat = seat_in(experiment, Meeting(meeting, experiment.hash), rank, size)
    folders = unchanged_folders(experiment, options)
    runs = [folder for folder in folders if folder.read_summary() is None]
    if runs:
        first = not store.check([f"tidied/{rank}"])         # else an earlier start of this process got this far
        trouble = tidied(runs, seat.hosted) if rank == 0 and first else ""
        if refused := all_gather(store, "tidied", trouble, rank, size, patience)[0]:
            end_attempt(store)
            raise InputError(refused) if rank == 0 else SystemExit(2)      # one sentence for all processes
        task = task or task_of(experiment, options)
        mine = Participant(task, runs, seat, options, temporary)
        with mine.locked(), ending(store):
            _train_share(mine, store, patience, watch, callbacks)
    if wait:
        with suppress(InputError):                          # a process that is gone for good
            all_gather(store, "combined", "", rank, size, patience)
    return [folder.read() for folder in folders]


CALLS = itertools.count()
"""Numbers the trainings of this process, in the same order in every process."""


def _check_alike(meeting: Store, experiment: Experiment, rank: int, size: int, patience: float) -> None:
    """Raise InputError in every process if one trains another experiment, as with unseeded models or data."""
    about = f"experiment/{next(CALLS)}"
    if meeting.check([f"{about}/{rank}"]):                  # by an earlier start of this process
        return
    theirs = all_gather(meeting, about, json.dumps(asdict(experiment)), rank, size, patience)
    first, *rest = _parsed(theirs, dict)
    for p, one in enumerate(rest, start=1):
        other = [name for name, value in first.items() if value != one.get(name)]
        if other:
            raise InputError(
                f"process {p} has another {' and '.join(other)} than process 0; call torch.manual_seed, and seed "
                "NumPy, before making the model and the data"
            )


def wait_for_all(experiment: Experiment, options: Options) -> None:
    """Wait until all processes have called this; ignore processes that are gone."""
    meeting, rank, size = join(options.peer_timeout)
    with suppress(InputError):
        all_gather(Meeting(meeting, experiment.hash), "read", "", rank, size, options.peer_timeout)


def _train_share(
    mine: Participant, store: Meeting, patience: float, watch: Watcher, callbacks: Sequence[object]
) -> None:
    """Join the other processes, train to the end, and combine the parts in process 0."""
    seat, runs = mine.seat, mine.runs
    mine.connect(patience)
    came_back = store.check([f"epochs/{seat.rank}"])        # an earlier start of this process agreed on an epoch
    if came_back or mine.engine.members.step_of_others:
        mine.rejoin()
    else:
        mine.resume(_agreed_epoch(store, seat, mine.saved, patience))
    board = TensorBoard() if mine.options.tensorboard and seat.rank == 0 else None
    everybody = [seat.parts(run) for run in runs]
    here = [one for one in callbacks if getattr(one, "everywhere", False)]
    of_all = [one for one in callbacks if one not in here]
    assembly = Assembly(runs, everybody, board, patience, of_all)
    ended = mine.run(watch, *here, *([assembly] if seat.rank == 0 else []), shared=True)
    if not ended:
        end_attempt(store)
        mine.engine.close()
        raise KeyboardInterrupt
    assembly.wait()                                         # a lost process may still reconnect to this one
    mine.engine.close()
    if seat.rank == 0:
        assembly.finish(mine.program)


def _agreed_epoch(store: Meeting, seat: Seat, epochs: set[int], timeout: float) -> int:
    """The latest epoch from which all processes can resume all runs."""
    mine = json.dumps(sorted(epochs))
    theirs = all_gather(store, "epochs", mine, seat.rank, len(seat.hosted), timeout)
    common: set[int] = set.intersection(*map(set, _parsed(theirs, list)))
    return max(common, default=0)


def _parsed(texts: Sequence[str], kind: type[_Value]) -> list[_Value]:
    """The JSON values that all processes wrote into the store."""
    with suppress(ValueError):
        values = [value for text in texts if isinstance(value := json.loads(text), kind)]
        if len(values) == len(texts):
            return values
    raise InputError("the rendezvous has values that no process of this run wrote; keep strangers from its port")


# ---------------------------------------------------------------------------------------- one machine


def launch(words: Sequence[str], experiment: Experiment, processes: int, all_print: bool = False) -> int:
    """Run `qg` with the arguments `words` in local processes; return the exit status of the first failure, or 0.

    Process 0 alone writes to standard output, or all do if `all_print`.
    """
    server = serve("127.0.0.1", 0)
    shared = {
        "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }

    running: dict[int, subprocess.Popen[bytes]] = {}
    restarts, failed, stopped = 0 if needs_all(experiment) else RESTARTS, 0, False

    def start(rank: int) -> None:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running[rank] = subprocess.Popen(
            [sys.executable, "-m", "quasiglobal", *words], env=os.environ | shared | own,
            stdout=None if rank == 0 or all_print else subprocess.DEVNULL,
            process_group=0,                                # signals come from here alone
        )
        if stopped:                                         # meanwhile
            running[rank].terminate()

    def stop(number: int, frame: object) -> None:
        """Pass Ctrl-C, SIGTERM and SIGHUP on as SIGTERM: the first lets the epoch end, the second stops at once.

        Unlike Ctrl-C, SIGTERM also stops a process that still imports its modules, or was started in the background.
        """
        nonlocal stopped
        stopped = True
        for process in list(running.values()):
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for rank in range(processes):
            start(rank)
        while running:
            for rank, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                if code < 0 and restarts and len(running) > 1 and not stopped:  # the others continue, and it rejoins
                    restarts -= 1
                    print(f"qg: process {rank} was killed (signal {-code}); starting it again", file=sys.stderr)
                    start(rank)
                    continue
                del running[rank]
                failed = code if code > 0 or not failed else failed     # an error says more than a signal
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped and failed == -signal.SIGTERM:               # before there was anything to save
        raise KeyboardInterrupt
    return failed
