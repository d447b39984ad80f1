"""Distributed training: the processes of one run (`qg train --engine distributed`), and their start on one machine.

Process p writes its measures and checkpoints into parts/p/ of the run folder. When all processes are done, process 0
combines the parts into the same files as the simulator's. Either engine resumes from the other's checkpoints.

If a lost process ends the run of all, the processes start again under another prefix of the store (an attempt): the
store outlives the processes, and still has the addresses and epochs of those that are gone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from torch import nn

from quasiglobal.common.files import alone
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.distributed import Distributed, MeanLost
from quasiglobal.errors import InputError
from quasiglobal.peers.gloo import Way
from quasiglobal.peers.rendezvous import Meeting, Store, all_gather, join, serve, spread, until
from quasiglobal.runs.agreement import refuse_faults, trust_of
from quasiglobal.runs.best import KeepBest
from quasiglobal.runs.building import task_of
from quasiglobal.runs.callbacks import TensorBoard, facts, watching
from quasiglobal.runs.checkpoints import Part, common, joined_checkpoint, nothing_intact, parts_of, records_of, stacked
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.saving import AgreedSaving, SaveParts, Saving, plan_path
from quasiglobal.runs.store import Run, RunFolder, Watcher, unchanged_folders, unwatched
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Callback, Loop, patient_interrupts
from quasiglobal.training.metrics import Measures, Record, RecordList
from quasiglobal.training.program import Program
from quasiglobal.training.rows import NamedRows
from quasiglobal.training.task import Task

GRACE = 60.0
"""Minimum timeout in seconds for processes to wait for each other at the start and at the end."""

STALE_EPOCHS = 5
"""Maximum age in epochs of a returning node's model; an older model is replaced by the neighbours' mean."""

STOPPING = 10.0
"""Maximum number of seconds that process 0 waits for the others to reach the epoch at which all stop."""

RESTARTS = 3
"""Maximum number of restarts of killed processes, over all processes."""

_Value = TypeVar("_Value")


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
    first, *rest = _gathered(meeting, about, asdict(experiment), rank, size, patience)
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
        mine.resume(_agreed_epoch(store, mine, patience))
    here = [one for one in callbacks if getattr(one, "everywhere", False)]
    of_all = [one for one in callbacks if one not in here]
    if mine.options.tensorboard and seat.rank == 0:
        of_all.append(TensorBoard())
    assembly = Assembly(runs, [seat.parts(run) for run in runs], patience, of_all)
    ended = mine.run(watch, *here, *([assembly] if seat.rank == 0 else []), shared=True)
    if not ended:
        end_attempt(store)
        mine.engine.close()
        raise KeyboardInterrupt
    assembly.wait()                                         # a lost process may still reconnect to this one
    mine.engine.close()
    if seat.rank == 0:
        assembly.finish(mine.program)


def _agreed_epoch(store: Meeting, mine: Participant, timeout: float) -> int:
    """The latest epoch from which all processes can resume all runs; one sentence for all processes if there is none.
    """
    seat = mine.seat
    theirs = _gathered(store, "epochs", sorted(mine.saved), seat.rank, len(seat.hosted), timeout)
    if saved := common(theirs):
        return max(saved)
    end_attempt(store)
    mine.check_saved()
    if seat.rank or not all(theirs):
        raise SystemExit(2)
    raise nothing_intact(mine.runs[0].folder / "parts")


def _gathered(store: Store, about: str, mine: _Value, rank: int, size: int, timeout: float) -> list[_Value]:
    """All-gather one JSON value per process."""
    texts = all_gather(store, about, json.dumps(mine), rank, size, timeout)
    with suppress(ValueError):
        values = [value for text in texts if isinstance(value := json.loads(text), type(mine))]
        if len(values) == size:
            return values
    raise InputError("the rendezvous has values that no process of this run wrote; keep strangers from its port")


# ---------------------------------------------------------------------------------------- one machine


def launch(words: Sequence[str], experiment: Experiment, processes: int, all_print: bool = False) -> int:
    """Run `qg` with the arguments `words` in local processes; return the exit status of the first failure, or 0.

    Only process 0 writes to standard output, or all processes if `all_print`.
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


# ---------------------------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Seat:
    """Rank and hosted nodes of this process in a run."""

    through: Way
    """Store or opener by which this process finds the others."""
    rank: int
    hosted: Sequence[tuple[int, ...]]
    """The nodes of every process."""
    experiment: str
    """Hash of the experiment; only processes with the same hash are admitted."""

    def parts(self, run: RunFolder) -> list[Part]:
        """The parts of all processes in a run folder."""
        return [Part(run.folder, rank, nodes) for rank, nodes in enumerate(self.hosted)]


def needs_all(experiment: Experiment) -> bool:
    """Whether a lost process cannot rejoin, since the algorithm needs exact means of all models."""
    return bool(traffic(experiment.resolved.algorithm).everybody)


def seat_in(experiment: Experiment, store: Meeting, rank: int, size: int) -> tuple[Meeting, Seat]:
    """The prefixed store and the seat of process `rank` of `size`, in the first attempt that has not ended.

    A process that returns to a run that needs all processes ends the attempt: the others cannot continue it either.
    """
    number = 0
    while True:
        place = Meeting(store, f"attempt/{number}")
        if not place.check(["ended"]):
            if not (place.check([f"epochs/{rank}"]) and needs_all(experiment)):
                hosted = spread(experiment.resolved.nodes, size)
                return place, Seat(place, rank, hosted, experiment.hash)
            end_attempt(place)
        number += 1


@contextmanager
def ending(place: Meeting) -> Iterator[None]:
    """End the attempt if a mean over all nodes has lost a process."""
    try:
        yield
    except MeanLost:
        end_attempt(place)
        raise


def end_attempt(place: Meeting) -> None:
    """Note that this attempt has ended for all processes."""
    with suppress(RuntimeError):                            # the store may be gone, and with it all attempts
        place.set("ended", "")


class Participant:
    """Trains the nodes of one process, with several runs as rows of one program."""

    def __init__(
        self, task: Task, runs: Sequence[RunFolder], seat: Seat, options: Options, temporary: bool = False,
        data: str | None = None,
    ) -> None:
        """`temporary`: the run folders are deleted afterwards, so a user's callbacks do not write into them.

        `data` is the fingerprint of a site's data.
        """
        self.runs, self.seat, self.options, self.temporary, self.data = runs, seat, options, temporary, data
        self.parts = [seat.parts(run)[seat.rank] for run in runs]
        saved = [part.epochs() for part in self.parts]
        self.saved = common(saved)
        """Epochs from which this process can resume all runs; empty if it has checkpoints, and all are damaged."""
        self._damaged = next((part for part, of in zip(self.parts, saved, strict=True) if not of), self.parts[0])
        engine = partial(
            Distributed, store=seat.through, rank=seat.rank, hosted=seat.hosted, timeout=options.peer_timeout,
            host=options.host, experiment=seat.experiment, round_deadline=runs[0].experiment.round_deadline,
            trust=options.trust or math.inf,
        )
        experiments = [run.experiment for run in runs]
        self.program = Program(task, experiments, choose_device(options.device), engine, **options.of_program)
        assert isinstance(self.program.engine, Distributed)
        self.engine = self.program.engine
        self.program.warm_up()

    def check_saved(self) -> None:
        """Raise InputError if this process has checkpoints, and cannot resume from any."""
        if not self.saved:
            raise nothing_intact(self._damaged.folder / "checkpoint")

    def connect(self, patience: float, epoch: int = 0) -> None:
        """Connect to the neighbours within `patience` seconds, after this many epochs here."""
        steps, program = self.program.feed.steps_per_epoch, self.program
        first = program.bands.bands[0].sends_model_first
        self.engine.connect(epoch * steps, patience, program.steps, program.state.x, sent_first=first)

    def resume(self, epoch: int) -> None:
        """Resume from the checkpoint of an epoch; 0: start from the initial models."""
        if epoch:
            self.program.restore([part.load(epoch) for part in self.parts])

    def rejoin(self) -> None:
        """Rejoin the others at their step, with the models saved here or with the neighbours' mean."""
        self.check_saved()
        saved, program, of_epoch = max(self.saved), self.program, self.program.feed.steps_per_epoch
        theirs = min(self.engine.members.step_of_others, program.steps - of_epoch)      # no claim of others ends a run
        self.resume(saved)
        model = self.engine.mean_of_neighbours(program.state.x)
        stale = theirs > (saved + STALE_EPOCHS) * of_epoch
        program.join(max(saved * of_epoch, theirs), model if stale else None)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run folders, shared with the other processes, and the parts of this process."""
        with ExitStack() as locks:
            for run, part in zip(self.runs, self.parts, strict=True):
                locks.enter_context(alone(run.folder, shared=True))
                locks.enter_context(alone(part.folder))
            yield

    def run(self, watch: Watcher, *further: object, shared: bool) -> bool:
        """Train to the end with the other processes; return False if Ctrl-C, here or elsewhere, stopped it before.

        `shared`: whether all processes share the run folder, so that they save and stop after the same epoch.
        """
        for run, part in zip(self.runs, self.parts, strict=True):
            run.describe()
            part.begin(self.program.state.epochs[0], self.data)
        with patient_interrupts() as noted:
            self.engine.members.noted, self.engine.members.stops_alone = noted, not shared
            seconds = self.options.checkpoint_seconds
            saving = Saving(seconds, noted)
            if shared:
                apart, steps = len(self.seat.hosted) * self.engine.topology.rounds, self.program.feed.steps_per_epoch
                all_wait = self.engine.pace.seconds is None
                saving = AgreedSaving(seconds, noted, self.runs[0].folder, apart, steps, all_wait)
            share = WriteParts(self.parts, self.engine, leave_tested=shared)
            best = [KeepBest()] if self.options.keep_best else []
            loop = Loop(
                self.program, [share, watching(self.runs, watch), *best, SaveParts(self.parts, saving), *further],
                folders=[] if self.temporary else [run.folder for run in self.runs],
                history=[records_of([part]) for part in self.parts],
            )
            loop.end_together = saving.end if shared else None
            loop.run()
        ended = loop.ended or bool(share.diverged)
        if ended:
            self.engine.members.end()
        return ended

    def write_part(self, measures: Measures, rows: NamedRows) -> None:
        """End the only run here with these measures and rows of its last epoch, which others have trained."""
        (part,), accounts = self.parts, self.engine.accounts()
        part.write(dict(measures) | {"lost": self.engine.lost, "edges": accounts, "written": time.time()})
        part.save(replace(self.program.checkpoint(0), rows=rows))
        part.finish("finished", accounts)

    def finish_alone(self, **further: object) -> None:
        """Write the runs from this process's parts only: a node with its own data has no access to other parts.

        `further` are entries of the summary.
        """
        for k, (run, part) in enumerate(zip(self.runs, self.parts, strict=True)):
            run.take_over(records_of([part]))
            data = {"data": used} if (used := part.data()) else {}
            run.finish(part.read_status() or "finished", facts(self.program, k) | data | further)


class WriteParts(Callback):
    """Writes the measures of every epoch and the final status; if one run diverges, all runs of this process stop."""

    def __init__(self, parts: Sequence[Part], engine: Distributed, leave_tested: bool) -> None:
        self.parts, self.engine, self.leave_tested = parts, engine, leave_tested
        self.diverged: set[int] = set()

    def on_epoch(self, loop: Loop) -> None:
        if self.leave_tested and loop.tested:               # before the measures, so that readers find the models
            for k, part in enumerate(self.parts):
                part.leave_tested(loop.program.rows_of(k), loop.epoch)
        now = {"lost": self.engine.lost, "edges": self.engine.accounts(), "written": time.time()}
        for part, measures in zip(self.parts, loop.measures, strict=True):
            part.write(dict(measures) | now)
        self.diverged |= set(loop.diverged)
        if self.diverged:
            loop.stop()

    def on_end(self, loop: Loop) -> None:
        for k, part in enumerate(self.parts):
            if k in self.diverged or loop.ended:
                part.finish("diverged" if k in self.diverged else "finished", self.engine.accounts())


# ---------------------------------------------------------------------------------------- combining the parts


class WholeRun:
    """The `run` that a callback receives in process 0: the records of all nodes, and the models hosted there."""

    def __init__(self, loop: Loop, runs: Sequence[Sequence[Record]]) -> None:
        self.loop, self.runs = loop, [RecordList(records) for records in runs]

    @property
    def records(self) -> list[Record]:
        """The records of the first experiment so far."""
        return self.runs[0]

    @property
    def latest(self) -> dict[int, Record]:
        """The last record of each experiment."""
        return {k: records[-1] for k, records in enumerate(self.runs) if records}

    @property
    def epoch(self) -> int:
        """Number of epochs that all processes have completed."""
        return self.records[-1]["epoch"] if self.records else 0

    def average(self) -> nn.Module:
        """The average of all models; raise InputError if other processes have some of them."""
        engine = self.loop.program.engine
        if len(engine.nodes) == engine.topology.n:
            return self.loop.average()
        raise InputError("a callback over processes has the models of its own process; use average() of the result")

    def __getattr__(self, name: str) -> object:
        return getattr(self.loop, name)


class Assembly(Callback):
    """Tests the averaged model of each tested epoch once all processes have written their models; finishes the runs.

    It uses only files: during training no process waits for it, and it sends no messages.
    """

    def __init__(
        self,
        runs: Sequence[RunFolder],
        parts: Sequence[Sequence[Part]],
        patience: float,
        callbacks: Sequence[object],
    ) -> None:
        """`parts` has the parts of all processes for each run; `wait` takes at most `patience` seconds.

        The `callbacks` are called with the records of all nodes, once all processes have completed an epoch.
        """
        self.runs, self.parts, self.patience, self.callbacks = runs, parts, patience, callbacks
        self.everything = [part for of_run in parts for part in of_run]

    def on_start(self, loop: Loop) -> None:
        """Continue where an earlier start was stopped or killed: before it tested its averages."""
        left = set.intersection(*(part.tested_epochs() for part in self.everything))
        self._pending = sorted(epoch for epoch in left if epoch <= loop.epoch)
        end = min(self._pending, default=loop.epoch + 1)
        self._view = WholeRun(loop, [[record for record in records_of(of) if record["epoch"] < end]
                                     for of in self.parts])
        self._call("on_start")

    def on_step(self, loop: Loop) -> None:
        self._call("on_step")

    def on_epoch(self, loop: Loop) -> None:
        if loop.tested:
            self._pending.append(loop.epoch)
        self._test_averages(loop.program)
        self._tell()

    def on_end(self, loop: Loop) -> None:
        if not loop.program.finished:                       # stopped, as all others are, after the same epoch
            with suppress(TimeoutError):
                until(lambda: all(part.last_epoch() >= loop.epoch for part in self.everything), STOPPING)
            self._test_averages(loop.program)
            self._end()

    def wait(self) -> None:
        """Wait until all processes have ended, at most `patience` seconds."""
        with suppress(TimeoutError):
            until(lambda: not self._missing(), self.patience)

    def finish(self, program: Program) -> None:
        """Write the runs in the simulator's format; raise InputError if a process has not ended."""
        missing = self._missing()
        if missing:
            folders = ", ".join(str(part.folder) for part in missing)
            raise InputError(f"{folders} did not finish; run the same command again to resume")
        self._test_averages(program)
        self._pending = []
        for k, (run, parts) in enumerate(zip(self.runs, self.parts, strict=True)):
            for part in parts:
                part.drop_tested(program.experiment.epochs)
            saved = joined_checkpoint(parts)
            diverged = any(part.read_status() == "diverged" for part in parts)
            run.take_over(records_of(parts))
            if saved and not diverged:
                run.save(saved)
            run.finish("diverged" if diverged else "finished", facts(program, k))
        self._end()

    def _end(self) -> None:
        self._tell()
        self._call("on_end")

    def _test_averages(self, program: Program) -> None:
        """Test the pending epochs for which all processes have written their models."""
        for epoch in list(self._pending):
            if not all(epoch in part.tested_epochs() for part in self.everything):
                continue
            for run, parts in enumerate(self.parts):
                whole = [found for part in parts if (found := part.read_tested(epoch)) is not None]
                if len(whole) == len(parts):
                    parts[0].write_of_all(epoch, program.evaluate_average(stacked(whole), run))
                for part in parts:
                    part.drop_tested(epoch)
            self._pending = [later for later in self._pending if later > epoch]

    def _tell(self) -> None:
        """Call the callbacks for the epochs since the last time that all processes have completed and tested."""
        if not self.callbacks:
            return
        end = min(self._pending, default=math.inf)
        whole = [[record for record in records_of(parts) if record["epoch"] < end] for parts in self.parts]
        for count in range(len(self._view.records) + 1, min(map(len, whole)) + 1):
            self._view.runs = [RecordList(records[:count]) for records in whole]
            self._call("on_epoch")

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self._view)

    def _missing(self) -> list[Part]:
        """The parts that have not ended."""
        return [part for part in self.everything if part.read_status() is None]


def tidied(runs: Sequence[RunFolder], hosted: Sequence[tuple[int, ...]]) -> str:
    """Prepare run folders for these processes: delete old save plans, and merge parts if nodes have moved.

    Return the error if another command trains in one of them.
    """
    try:
        for run in runs:
            with alone(run.folder):
                plan_path(run.folder).unlink(missing_ok=True)
                moved = zip(parts_of(run.folder), hosted, strict=False)
                if any(part.nodes != list(nodes) for part, nodes in moved):
                    if newest := run.newest():
                        run.save(newest)                    # the old parts, merged
                    shutil.rmtree(run.folder / "parts")
    except InputError as error:
        return str(error)
    return ""
