"""One process of a distributed run: its seat, its program, its parts on disk, and joining the other processes.

Where a lost process ends the run of all, the processes start again in another place of the store (an attempt): the
store outlives the processes, and has the addresses and epochs of those that are gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from quasiglobal.common.files import alone
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.distributed import Distributed, MeanLost
from quasiglobal.peers.gloo import Way
from quasiglobal.peers.rendezvous import Meeting, spread
from quasiglobal.runs.best import KeepBest
from quasiglobal.runs.callbacks import Watch, facts
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.parts import Part, records_of
from quasiglobal.runs.saving import AgreedSaving, SaveParts, Saving
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.training.callbacks import patient_interrupts
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import Measures
from quasiglobal.training.program import Program
from quasiglobal.training.rows import NamedRows
from quasiglobal.training.task import Task

STALE_EPOCHS = 5
"""Maximum age in epochs of a returning node's model; an older model is replaced by the neighbours' mean."""


@dataclass(frozen=True)
class Seat:
    """Rank and hosted nodes of this process in a run."""

    through: Way
    """How this process finds the others."""
    rank: int
    hosted: Sequence[tuple[int, ...]]
    """The nodes of every process."""
    experiment: str
    """Hash of the experiment; only processes with the same hash are admitted."""

    def parts(self, run: RunFolder, mine: bool = False) -> list[Part]:
        """The parts of all processes in a run folder, or only this process's if `mine`."""
        ranks = [self.rank] if mine else range(len(self.hosted))
        return [Part(run.folder, rank, self.hosted[rank]) for rank in ranks]


def needs_all(experiment: Experiment) -> bool:
    """Whether a process that was lost cannot come back: the algorithm needs exact means of all models."""
    return bool(traffic(experiment.resolved.algorithm).everybody)


def seat_in(experiment: Experiment, store: Meeting, rank: int, size: int) -> tuple[Meeting, Seat]:
    """The place in the store and the seat of process `rank` of `size`, in the first attempt that has not ended.

    A process that comes back to a run that needs all ends the attempt: the others cannot continue it either.
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
        self, task: Task, runs: Sequence[RunFolder], seat: Seat, options: Options, temporary: bool = False
    ) -> None:
        """`temporary`: the run folders are deleted afterwards, so a user's callbacks do not write into them."""
        self.runs, self.seat, self.options, self.temporary = runs, seat, options, temporary
        self.parts = [part for run in runs for part in seat.parts(run, mine=True)]
        self.saved = set.intersection(*(part.epochs() for part in self.parts))
        """Epochs from which this process can resume all runs."""
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
        """Rejoin the others at their next epoch, with the models saved here or with the neighbours' mean."""
        saved, program = max(self.saved), self.program
        theirs = math.ceil(self.engine.members.step_of_others / program.feed.steps_per_epoch)
        epoch = max(saved, min(theirs, program.experiment.epochs - 1))      # no claim of others ends a run
        if saved:
            program.restore([part.load(saved) for part in self.parts])
        model = self.engine.mean_of_neighbours(program.state.x)
        if model is not None and epoch - saved > STALE_EPOCHS:
            program.begin_at(model)
        program.state.epochs = [epoch] * len(self.runs)

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
            part.begin(self.program.state.epochs[0])
        with patient_interrupts() as noted:
            seconds = self.options.checkpoint_seconds
            saving = Saving(seconds, noted)
            if shared:
                apart, steps = len(self.seat.hosted) * self.engine.topology.rounds, self.program.feed.steps_per_epoch
                all_wait = self.engine.pace.seconds is None
                saving = AgreedSaving(seconds, noted, self.runs[0].folder, apart, steps, all_wait)
            share = WriteParts(self.parts, self.engine, leave_tested=shared)
            best = [KeepBest()] if self.options.keep_best else []
            loop = Loop(
                self.program, [share, Watch(self.runs, watch), *best, SaveParts(self.parts, saving), *further],
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

    def finish_alone(self, further: Mapping[str, object] | None = None) -> None:
        """Write the runs from this process's parts alone: a node with its own data has no access to other parts.

        `further` are entries of the summary.
        """
        for k, (run, part) in enumerate(zip(self.runs, self.parts, strict=True)):
            run.take_over(records_of([part]))
            run.finish(part.read_status() or "finished", facts(self.program, k) | dict(further or {}))

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
