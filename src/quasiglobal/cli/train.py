"""Commands that train: train, node, rendezvous."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import ExperimentCommand, Folder, call, parsed
from quasiglobal.cli.tables import comparison
from quasiglobal.cli.terminal import console, log_as, watcher
from quasiglobal.engines.distributed import launched, serve, spread
from quasiglobal.runs import distributed
from quasiglobal.runs.agreement import refuse_faults
from quasiglobal.runs.launch import launch
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, folders_of
from quasiglobal.runs.sweep import sweep
from quasiglobal.topology.parsing import count_nodes
from quasiglobal.training.experiment import Experiment, from_toml


@dataclass(frozen=True)
class Train(ExperimentCommand):
    """Train one model per node. Run the same command again to resume a stopped run; a finished run is not repeated."""


def train(command: Train, words: Sequence[str]) -> None:
    """`qg train`; the words are passed on to the processes that it starts."""
    experiment, options = command.experiment, command.options
    log_as(options.log)
    if options.engine == "distributed" and options.processes and not launched():
        refuse_faults(experiment)
        spread(count_nodes(experiment.topology), options.processes)             # raises once if there are too many
        sys.exit(launch(["train", *words], experiment, options.processes, all_print=options.log == "json"))
    finished = [folder for folder in folders_of(experiment, options) if folder.read_summary() is not None]
    if len(finished) < options.seeds:
        console.print(_schedule_in_words(experiment))
    with watcher(options.log) as watch:
        if options.engine == "distributed":
            runs = distributed.train(experiment, options, watch)
        else:
            runs = sweep([experiment], options, watch)
    for folder in finished:
        console.print(f"{folder.folder} is already finished")
    comparison(runs).show()
    console.print("runs: " + ", ".join(str(run.folder) for run in runs))
    _exit_if_diverged(runs)


def _exit_if_diverged(runs: Sequence[Run]) -> None:
    """Exit with status 3 if a run diverged."""
    if any(run.status == "diverged" for run in runs):
        console.print("⋆ the loss grew too large: try a smaller --lr, and scale numbers to predict to about 1")
        sys.exit(3)


def _schedule_in_words(experiment: Experiment) -> str:
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


def node(
    file: Annotated[Positional[Path], arg(metavar="FILE.toml")],
    node: int,
    data: Annotated[str, arg(metavar="PATH")],
    rendezvous: Annotated[str, arg(metavar="HOST:PORT")],
    host: str = "127.0.0.1",
    runs: Folder = Path("runs"),
    device: str = "auto",
    peer_timeout: float = 60.0,
    round_deadline: float | None = None,
    patience: float = 3600.0,
    checkpoint_seconds: float = 60.0,
    tensorboard: bool = False,
    log: Literal["plain", "json"] = "plain",
) -> None:
    """Run one node of an experiment on your own data, which never leaves this machine.

    Each owner starts one node with the same experiment file, on any machine that reaches its neighbours. The file
    fixes the settings that all owners share: classes, shape, steps and, for images, mean and std. A restarted node
    rejoins the others.

    Args:
        file: The experiment, the same file at every node.
        node: Index of this node in the topology, from 0.
        data: Your data: class folders of images, an .npz archive, or texts, as a .csv file or a folder with train.csv.
        rendezvous: Address of a running `qg rendezvous`.
        host: The address at which neighbours reach this machine.
        runs: The folder for this node's records and checkpoints.
        device: auto, cpu or cuda.
        peer_timeout: Seconds after which the node continues without a neighbour that does not answer.
        round_deadline: Seconds after which a step goes on without late neighbours, if the file does not say; the same
            at every node.
        patience: Seconds to wait for the neighbours at the start.
        checkpoint_seconds: Save a checkpoint at the end of an epoch before the last one is this old; 0: every epoch.
        tensorboard: Also write the metrics for TensorBoard, into the run folder.
        log: Log format: plain sentences, or one JSON object per line.
    """
    experiment = from_toml(file)
    if round_deadline is not None:
        experiment = replace(experiment, round_deadline=round_deadline)
    log_as(log)
    options = Options(
        runs=runs, device=device, peer_timeout=peer_timeout, host=host, log=log, tensorboard=tensorboard,
        checkpoint_seconds=checkpoint_seconds,
    )
    console.print(_schedule_in_words(experiment))
    with watcher(log) as watch:
        run = distributed.train_node(experiment, node, data, rendezvous, options, patience, watch)
    comparison([run]).show()
    console.print(f"run: {run.folder}")
    _exit_if_diverged([run])


def rendezvous(port: int, host: str = "127.0.0.1") -> None:
    """Serve the store where processes find each other, until stopped.

    MASTER_ADDR and MASTER_PORT are its address, as under torchrun. Processes need it only to join, not to train.

    Args:
        port: The port to listen on.
        host: The address of this machine to listen on; by default only this machine can connect.
    """
    server = serve(host, port)
    console.print(f"listening on {host}:{server.port}; stop with Ctrl-C")
    while True:
        time.sleep(3600)


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "train":
        train(parsed(Train, name, words), words)
    else:
        call({"node": node, "rendezvous": rendezvous}, name, words)
