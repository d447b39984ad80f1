"""Commands that train: train, and node and rendezvous for a node with its own data."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import ExperimentCommand, Folder, call, parsed
from quasiglobal.cli.tables import comparison, models_in_words
from quasiglobal.cli.terminal import console, log_as, watcher
from quasiglobal.errors import InputError
from quasiglobal.peers.rendezvous import launched, serve, spread
from quasiglobal.runs.agreement import refuse_faults
from quasiglobal.runs.distributed import launch, train_over_processes
from quasiglobal.runs.node import AtRendezvous, InFederation, MeetingPlace, train_node
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, folders_of
from quasiglobal.runs.sweep import sweep
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


def node(
    file: Annotated[Positional[Path], arg(metavar="FILE.toml")],
    data: Annotated[str, arg(metavar="PATH")],
    site: Folder | None = None,
    listen: Annotated[str | None, arg(metavar="HOST:PORT")] = None,
    node: int | None = None,
    rendezvous: Annotated[str | None, arg(metavar="HOST:PORT")] = None,
    host: str = "127.0.0.1",
    runs: Folder = Path("runs"),
    device: str = "auto",
    peer_timeout: float = 60.0,
    round_deadline: float | None = None,
    weights: str | None = None,
    patience: float = 3600.0,
    trust: Annotated[float | None, arg(metavar="R")] = None,
    linger: float = 600.0,
    checkpoint_seconds: float = 60.0,
    tensorboard: bool = False,
    log: Literal["plain", "json"] = "plain",
    metrics_port: Annotated[str | None, arg(metavar="PORT")] = None,
) -> None:
    """Run one node of an experiment on your own data, which never leaves this machine.

    Each owner starts one node with the same experiment file, on any machine that reaches its neighbours. The file
    fixes the settings that all owners share: classes, shape, steps and, for images, mean and std. A restarted node
    rejoins the others.

    Between sites, --site names the folder that `qg site` made: neighbours connect over mutual TLS, and need no
    rendezvous. Within one cluster, --rendezvous and --node connect nodes without encryption.

    Args:
        file: The experiment, the same file at every node.
        data: Your data: class folders of images, an .npz archive, or texts, as a .csv file or a folder with train.csv.
        site: The folder with this site's key, certificate and federation file.
        listen: This machine's own address, if neighbours reach it by another one, as behind a firewall; 0.0.0.0:PORT
            is all of its addresses.
        node: Index of this node in the topology, from 0, with --rendezvous.
        rendezvous: Address of a running `qg rendezvous`.
        host: The address at which neighbours reach this machine, with --rendezvous.
        runs: The folder for this node's records and checkpoints.
        device: auto, cpu or cuda.
        peer_timeout: Seconds after which the node continues without a neighbour that does not answer.
        round_deadline: Seconds after which a step goes on without late neighbours, if the file does not say; the same
            at every node.
        weights: How much each node counts, a number for each, as in 1200,340,80, if the file does not say; the same at
            every node.
        patience: Seconds to wait for the neighbours at the start.
        linger: Seconds in which neighbours that missed the end can fetch the model, with --site: if some are missing
            when this node has finished, and whenever this command finds its run finished. 0: exit at once.
        trust: Clip a neighbour's model that is more than R times as far from the own model as other neighbours' usually
            are; inf clips nothing. By default 8 between sites, and inf at a rendezvous or if the algorithm needs whole
            messages.
        checkpoint_seconds: Save a checkpoint at the end of an epoch before the last one is this old; 0: every epoch.
        tensorboard: Also write the metrics for TensorBoard, into the run folder.
        log: Log format: plain sentences, or one JSON object per line.
        metrics_port: Serve metrics for Prometheus, at http://127.0.0.1:PORT/metrics; HOST:PORT for other machines, to
            whoever reaches that address.
    """
    place = _place(site, listen, node, rendezvous)
    experiment = from_toml(file)
    if round_deadline is not None:
        experiment = replace(experiment, round_deadline=round_deadline)
    if weights is not None:
        experiment = replace(experiment, weights=weights)
    log_as(log)
    options = Options(
        runs=runs, device=device, peer_timeout=peer_timeout, host=host, log=log, tensorboard=tensorboard,
        checkpoint_seconds=checkpoint_seconds, keep_best=True, trust=trust, engine="distributed",
    )
    console.print(schedule_in_words(experiment))
    with watcher(log, timed=True) as watch:
        run = train_node(experiment, place, data, options, patience, watch, metrics_port, linger)
    comparison([run]).show()
    console.print(f"run: {run.folder}")
    if said := models_in_words(run):
        console.print(said, soft_wrap=True)
    exit_if_diverged([run])


def _place(site: Path | None, listen: str | None, node: int | None, rendezvous: str | None) -> MeetingPlace:
    if site is not None:
        if node is not None or rendezvous is not None:
            raise InputError("--site has the node's number and its neighbours; leave out --node and --rendezvous")
        return InFederation(site, listen)
    if node is None or rendezvous is None:
        raise InputError("name the site's folder with --site, or --node and --rendezvous within one cluster")
    return AtRendezvous(node, rendezvous)


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
    """Run one of these commands."""
    if name == "train":
        train(parsed(Train, name, words), words)
    else:
        call({"node": node, "rendezvous": rendezvous}, name, words)
