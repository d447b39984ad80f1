"""Commands about an experiment: train, check and tune, and node and rendezvous for a node with its own data."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from quasiglobal.cli.arguments import ExperimentCommand, Folder, Json, call, only_simulated, parsed
from quasiglobal.cli.explain import topology_facts, topology_values
from quasiglobal.cli.look import comparison, models_in_words
from quasiglobal.cli.terminal import (
    Values,
    console,
    facts_table,
    log_as,
    preparing,
    print_json,
    say_written,
    size_in_words,
    time_in_words,
    watcher,
)
from quasiglobal.common import own_code
from quasiglobal.errors import InputError
from quasiglobal.peers.bandwidth import read_bandwidth
from quasiglobal.peers.dialling import read_proxy
from quasiglobal.peers.rendezvous import launched, serve, spread
from quasiglobal.runs import plots, tuning
from quasiglobal.runs.agreement import has_own_data, refuse_faults, trust_of
from quasiglobal.runs.distributed import launch, train_over_processes
from quasiglobal.runs.estimate import DAY, estimate, prepare
from quasiglobal.runs.node import AtRendezvous, InFederation, MeetingPlace, train_node
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, folders_of
from quasiglobal.runs.sweep import sweep
from quasiglobal.training.experiment import Experiment, from_toml
from quasiglobal.training.metrics import number


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
        own_code.check_all(asdict(experiment))
        words = [*words, *own_code.allowed()]
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


@dataclass(frozen=True)
class Check(ExperimentCommand):
    """Estimate the cost of `qg train` with the same options and report likely problems. Writes nothing."""

    bandwidth: Annotated[str | None, arg(metavar="RATE")] = None
    """Bandwidth of each node's link, as in 50mbit, which may limit the bytes of a day."""
    json: Json = False


def check(command: Check) -> None:
    """`qg check`."""
    experiment, options = command.experiment, command.options
    bandwidth = read_bandwidth(command.bandwidth) if command.bandwidth else math.inf
    if options.engine == "distributed":
        refuse_faults(experiment)
        trust_of(experiment, options.trust)
    with preparing():
        task, experiments = prepare(experiment, options)
    graph = topology_values(experiment.resolved.topology_on(task.data))
    with console.status("timing a few steps"):
        taken = estimate(task, experiments, options)
    sent, (a_day, seconds) = taken.sent_a_step, taken.sent_a_day(bandwidth)
    an_epoch, all_steps = sent * taken.steps / experiment.epochs, sent * taken.steps
    own = has_own_data(experiment)
    if own:
        console.print("each owner has its own data: its memory and the time of its tests are not counted")
    if command.json:
        print_json(graph | {"model": experiment.model, "seeds": options.seeds} | {
            UNITS.get(name, name): None if own and name == "data" else value for name, value in asdict(taken).items()
        } | {"sent_bytes_per_epoch": an_epoch, "sent_bytes_per_run": all_steps, "sent_bytes_per_day": a_day})
        return
    nodes = f"{graph['nodes']} nodes" + (f" × {options.seeds} seeds" if options.seeds > 1 else "")
    data = "" if own else f", {size_in_words(taken.data)} for the data"
    shards = f", {size_in_words(taken.shards)} for the data" if taken.shards else ""
    most, there = size_in_words(taken.peak), size_in_words(taken.memory)
    peak = f", at most {most} of the GPU's {there}, in tests too" if taken.peak else ""
    peak += f"; {taken.together} of {options.seeds} seeds at a time" if taken.together < options.seeds else ""
    rows = size_in_words(taken.rows)
    measured = seconds == taken.step_seconds
    speed = "at the speed measured here" if measured else f"as fast as {command.bandwidth} carries it"
    in_a_day = "the whole run" if a_day == all_steps else f"{DAY / seconds:,.0f} steps"
    console.print(facts_table(topology_facts(graph) | {
        "model": f"{experiment.model}, {taken.parameters:,} parameters, {nodes}",
        "sent per node": f"{size_in_words(sent)} per step, {size_in_words(an_epoch)} per epoch, "
        f"{size_in_words(all_steps)} over the whole run",
        "sent per day": f"{size_in_words(a_day)} per node for {in_a_day}, {speed}",
        "memory": f"{rows} for models and momentum{data}{peak}",
        "disk": f"{size_in_words(taken.checkpoints)} for the checkpoints{shards}",
        "time": f"about {time_in_words(taken.seconds)}: {taken.steps:,} steps of {1000 * taken.step_seconds:.3g} ms, "
        f"and a test every {experiment.eval_every} epochs",
    }))


UNITS = {
    "sent_a_step": "sent_bytes_per_step", "rows": "models_bytes", "data": "data_bytes", "peak": "gpu_peak_bytes",
    "memory": "gpu_bytes", "together": "seeds_at_a_time", "shards": "data_on_disk_bytes",
    "checkpoints": "checkpoint_bytes",
}
"""Names in JSON of the estimate's fields in bytes."""


@dataclass(frozen=True)
class Tune(ExperimentCommand):
    """Tune the learning rate or other hyperparameters on a grid that grows until the best point lies inside it.

    Trials use the experiment's seed; then all --seeds run at the best point. Finished runs are not run again.
    """

    over: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME=VALUES")] = ()
    """Names to tune and their values, as in lr=0.1,0.2,0.4,beta=0.8,0.9, or one --over per name. A name is a field
    of the experiment or an option of the algorithm; all combinations are tried. The default, lr without values,
    tries three rates around the experiment's own."""
    cap: int = tuning.CAP
    """Maximum number of trials of a growing grid; 0: the grid does not grow."""
    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw the grid into this file (.png, .svg or .pdf): a curve for one name, a heat map for two."""
    json: Json = False


def tune(command: Tune) -> None:
    """`qg tune`."""
    experiment, options, plot = command.experiment, command.options, command.plot
    only_simulated("tune", options)
    log_as(options.log)
    names = tuning.parse_over(",".join(command.over or ("lr",)))
    if plot is not None:
        plots.check_drawable(plot, names)
    with watcher(options.log) as watch:
        (tuned,) = tuning.tune([experiment], names, options, command.cap, watch)
    if command.json:
        print_json(_tuned_values(tuned))
    else:
        _show_tuned(tuned, command.cap)
    if plot is not None:
        plots.save_as(plots.draw_tuning(tuned.grid, tuned.scores, tuned.best, tuned.trials[tuned.best].ranking()), plot)
        say_written([plot])


def _tuned_values(tuned: tuning.Tuned) -> Values:
    """The result of a tuning as raw values."""
    def at(point: tuple[float, ...]) -> dict[str, float]:
        return dict(zip(tuned.grid, point, strict=True))

    score = tuned.trials[tuned.best].ranking()
    trials = [
        {**at(point), "score": number(run.summary.last if run.summary else None, score.name), "status": run.status,
         "run": str(run.folder)}
        for point, run in sorted(tuned.trials.items())
    ]
    best = at(tuned.best) if any(map(math.isfinite, tuned.scores.values())) else None
    return {
        "metric": score.name, "best": best, "inside": tuned.inside, "trials": trials,
        "settings": comparison(tuned.runs).rows,
    }


def _show_tuned(tuned: tuning.Tuned, cap: int) -> None:
    """Print the grid, the best point and its runs."""
    console.print(_grid(tuned))
    best = ", ".join(f"{name} = {value:g}" for name, value in zip(tuned.grid, tuned.best, strict=True))
    beyond = f"; it lies at an end of the grid: raise --cap above {cap}, or try other values"
    said = f"best: {best}, of {len(tuned.trials)} trials with seed {tuned.experiment.seed}"
    said += "" if tuned.inside else beyond
    if not any(map(math.isfinite, tuned.scores.values())):
        said = f"all {len(tuned.trials)} trials diverged; give other values with --over"
    console.print(said, soft_wrap=True)
    comparison(tuned.runs).show()


def _grid(tuned: tuning.Tuned) -> Table:
    """A table of the score at every point, with the best marked; the columns are the values of a second name."""
    score = tuned.trials[tuned.best].ranking()

    def cell(point: tuple[float, ...]) -> str:
        reached = tuned.scores[point]
        text = score.shown(-reached if score.lower else reached) if math.isfinite(reached) else "diverged"
        return f"{text} ← best" if point == tuned.best and math.isfinite(reached) else text

    names = list(tuned.grid)
    if len(names) != 2:
        table = Table(*names, score.title)
        for point in sorted(tuned.trials):
            table.add_row(*(f"{value:g}" for value in point), cell(point))
        return table
    rows, columns = tuned.grid.values()
    table = Table(names[0], *(f"{names[1]} = {value:g}" for value in columns), title=score.title)
    for low in rows:
        table.add_row(f"{low:g}", *(cell((low, high)) for high in columns))
    return table


def node(
    file: Annotated[Positional[Path], arg(metavar="FILE.toml")],
    data: Annotated[str, arg(metavar="PATH")],
    site: Folder | None = None,
    listen: Annotated[str | None, arg(metavar="HOST:PORT")] = None,
    proxy: Annotated[str | None, arg(metavar="URL")] = None,
    bandwidth: Annotated[str | None, arg(metavar="RATE")] = None,
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
    """Run one node of an experiment on your own data.

    Neighbours receive models, not your files; they may reconstruct some examples from them (docs/deploy.md).

    Each owner starts one node with the same experiment file, on any machine that reaches its neighbours. The file
    fixes the settings that all owners share: classes, shape, steps and, for images, mean and std. A restarted node
    rejoins the others.

    Between sites, --site names the folder that `qg site` made: neighbours connect over mutual TLS, and need no
    rendezvous. Within one cluster, --rendezvous and --node connect nodes without encryption.

    Args:
        file: The experiment, the same file at every node.
        data: Your data: class folders of images, an .npz archive, or texts, as a .csv file or a folder with train.csv.
        site: The folder with this site's key, certificate and federation file.
        listen: Address to listen at, if neighbours reach this machine by another one, as behind a firewall;
            0.0.0.0:PORT listens at all of its addresses.
        proxy: Dial the neighbours through this HTTP proxy, http://HOST:PORT (CONNECT), with --site. Set QG_PROXY_AUTH
            to user:password if it asks for them.
        bandwidth: Send at most this much per second to all neighbours together, as in 50mbit, with --site.
        node: Index of this node in the topology, from 0, with --rendezvous.
        rendezvous: Address of a running `qg rendezvous`.
        host: The address at which neighbours reach this machine, with --rendezvous.
        runs: The folder for this node's records and checkpoints.
        device: auto, cpu or cuda.
        peer_timeout: Seconds after which the node continues without a neighbour that does not answer.
        round_deadline: Seconds after which a step continues without late neighbours, if the file does not say; the same
            at every node.
        weights: Weight of each node, one number per node, as in 1200,340,80, if the file does not say; the same at
            every node.
        patience: Seconds to wait for the neighbours at the start.
        linger: Seconds in which neighbours that missed the end can fetch the model, with --site: if some are missing
            when this node has finished, and whenever this command finds its run finished. 0: exit at once.
        trust: Clip a neighbour's model that is more than R times as far from this node's as other neighbours' usually
            are; inf clips nothing. By default 8 between sites, and inf at a rendezvous or if the algorithm needs whole
            messages.
        checkpoint_seconds: Save a checkpoint at the end of an epoch before the last one is this old; 0: every epoch.
        tensorboard: Also write the metrics for TensorBoard, into the run folder.
        log: Log format: plain sentences, or one JSON object per line.
        metrics_port: Serve metrics for Prometheus, at http://127.0.0.1:PORT/metrics; HOST:PORT for all
            machines that reach that address.
    """
    if site is None and (proxy or bandwidth):
        raise InputError("--proxy and --bandwidth are for the sites of a federation; name a site's folder with --site")
    place = _place(site, listen, node, rendezvous)
    if isinstance(place, InFederation):
        place = replace(
            place, proxy=read_proxy(proxy) if proxy else None,
            bandwidth=read_bandwidth(bandwidth) if bandwidth else math.inf,
        )
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
    elif name == "check":
        check(parsed(Check, name, words))
    elif name == "tune":
        tune(parsed(Tune, name, words))
    else:
        call({"node": node, "rendezvous": rendezvous}, name, words)
