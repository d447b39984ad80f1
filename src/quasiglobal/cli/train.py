"""The command that trains: train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quasiglobal.cli.arguments import ExperimentCommand, parsed
from quasiglobal.cli.tables import comparison
from quasiglobal.cli.terminal import console, log_as, watcher
from quasiglobal.peers.rendezvous import launched, spread
from quasiglobal.runs.agreement import refuse_faults
from quasiglobal.runs.distributed import launch, train_over_processes
from quasiglobal.runs.store import Run, folders_of
from quasiglobal.runs.sweep import sweep
from quasiglobal.training.experiment import Experiment


@dataclass(frozen=True)
class Train(ExperimentCommand):
    """Train one model per node. Run the same command again to resume a stopped run; a finished run is not repeated."""


def train(command: Train, words: Sequence[str]) -> None:
    """`qg train`; the words are passed on to the processes that it starts."""
    experiment, options = command.experiment, command.options
    log_as(options.log)
    if options.engine == "distributed" and options.processes and not launched():
        refuse_faults(experiment)
        spread(experiment.resolved.nodes, options.processes)             # raises once if there are too many
        sys.exit(launch(["train", *words], experiment, options.processes, all_print=options.log == "json"))
    finished = [folder for folder in folders_of(experiment, options) if folder.read_summary() is not None]
    if len(finished) < options.seeds:
        console.print(schedule_in_words(experiment))
    with watcher(options.log) as watch:
        if options.engine == "distributed":
            runs = train_over_processes(experiment, options, watch)
        else:
            runs = sweep([experiment], options, watch)
    for folder in finished:
        console.print(f"{folder.folder} is already finished")
    comparison(runs).show()
    console.print("runs: " + ", ".join(str(run.folder) for run in runs))
    exit_if_diverged(runs)


def exit_if_diverged(runs: Sequence[Run]) -> None:
    """Exit with status 3 if a run diverged."""
    if any(run.status == "diverged" for run in runs):
        console.print("⋆ the loss grew too large: try a smaller --lr, and scale numbers to predict to about 1")
        sys.exit(3)


def schedule_in_words(experiment: Experiment) -> str:
    """The learning-rate schedule as text."""
    peak, start = experiment.peak_lr, experiment.warmup_from
    if experiment.schedule == "constant":
        return f"learning rate {peak:g}, constant"
    warm = ""
    if peak > start and experiment.warmup:
        short = " (longer than the run)" if experiment.warmup > experiment.epochs else ""
        warm = f", warm-up from {start:g} over {experiment.warmup:g} epochs{short}"
    if experiment.schedule != "steps":
        return f"learning rate {peak:g}{warm}, {experiment.schedule} to 0"
    decays = ", ".join(f"{fraction:g}" for fraction in experiment.milestones)
    decay = f", × {experiment.decay:g} at {decays} of the run" if decays else ""
    return f"learning rate {peak:g}{warm}{decay}" if warm or decay else f"learning rate {peak:g}, constant"


def run(name: str, words: Sequence[str]) -> None:
    """Run the command."""
    train(parsed(Train, name, words), words)
