"""The command line, `qg`: the only place that knows of tyro and the terminal."""

from __future__ import annotations

import inspect
import io
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from tyro.conf import Positional, UseAppendAction, arg

import quasiglobal as qg
from quasiglobal.common.files import as_line, write_csv
from quasiglobal.data.corpus import LENGTH
from quasiglobal.data.partition import class_counts, fingerprint, heterogeneity, split
from quasiglobal.data.readers.tables import read_texts
from quasiglobal.data.sources import SOURCES, TEXT_SOURCES, Corpus, Dataset, available, raw
from quasiglobal.engines.costs import Entry, catalogue, describe
from quasiglobal.engines.distributed.engine import spread
from quasiglobal.engines.distributed.rendezvous import launched, serve
from quasiglobal.errors import unknown
from quasiglobal.paper import demo as demonstration
from quasiglobal.paper import summary
from quasiglobal.paper.figures import reproduce as make_figure
from quasiglobal.paper.figures import write as write_figure
from quasiglobal.paper.published import NOT_CONVERGED
from quasiglobal.paper.reproduce import Outcome, absent, ended, missing_data
from quasiglobal.paper.reproduce import reproduce as run_table
from quasiglobal.paper.tables import TABLES, Scale
from quasiglobal.paper.tables import Table as Targeted
from quasiglobal.paper.targets import TARGETS, cost, recorded, stand
from quasiglobal.paper.trained import draw as draw_trained
from quasiglobal.report import plots
from quasiglobal.report.markdown import table as markdown_table
from quasiglobal.runs.estimate import estimate
from quasiglobal.runs.export import export as export_model
from quasiglobal.runs.export import read as read_model
from quasiglobal.runs.export import save as save_model
from quasiglobal.runs.local import (
    Options,
    Run,
    Watcher,
    choose_device,
    data_of,
    find,
    group_by_setting,
    last_and_best,
    prepare,
    terms_of,
)
from quasiglobal.runs.parts import parts_of
from quasiglobal.runs.peers import train as train_node
from quasiglobal.runs.processes import launch, refuse_faults
from quasiglobal.runs.processes import train as train_part
from quasiglobal.runs.sweep import sweep
from quasiglobal.runs.tuning import CAP, Tuned, parse_over
from quasiglobal.runs.tuning import tune as tune_experiments
from quasiglobal.training.experiment import Experiment, from_toml
from quasiglobal.training.metrics import Record

Graph = Annotated[Positional[str], arg(metavar="GRAPH")]
Name = Annotated[Positional[str | None], arg(metavar="NAME")]
Folder = Annotated[Path, arg(metavar="FOLDER")]
Folders = Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...")]
File = Annotated[Path, arg(metavar="FILE")]
Toml = Annotated[Positional[Path | None], arg(metavar="FILE.toml")]

app = tyro.extras.SubcommandApp()
console = Console(highlight=False, markup=False)


@app.command
def demo(out: Folder = Path("out")) -> None:
    """Why local momentum struggles on heterogeneous data, and quasi-global momentum less so.

    16 small convolutional networks on a ring learn to read digits, with four algorithms; two minutes on two cores.

    Args:
        out: The folder for demo.png, demo.svg, demo.csv and the runs.
    """
    setting = demonstration.Setting()
    alphas = " and ".join(f"{alpha:g}" for alpha in setting.alphas)
    console.print(
        "16 nodes on a ring, each with its own few kinds of digits, learn to read all ten "
        f"(Dirichlet α = {alphas}).\nNobody sees another's images; neighbours average their models after each step.\n"
    )
    with _progress() as progress:
        task = progress.add_task("", total=setting.epochs)
        outcomes = demonstration.compare(
            setting, out / "runs", advance=lambda name: progress.update(task, advance=1, description=name)
        )
    rows = demonstration.numbers(outcomes)
    table = Table("algorithm", "data", "tuned lr", "test accuracy, %", "worst node", "averaged model")
    for row in rows:
        table.add_row(
            f"{row['algorithm']}", f"{row['data']}", f"{row['lr']:g}", f"{row['accuracy']:.1f} ± {row['std']:.1f}",
            f"{row['worst_node']:.1f}", f"{row['averaged_model']:.1f}",
        )
    console.print(table)
    by_name = {row["algorithm"]: row for row in rows}               # the last: the smallest α
    local, quasi = by_name["dsgdm-n"], by_name["qg-dsgdm-n"]
    console.print(
        f"At {local['data']}, local momentum (dsgdm-n) reaches {local['accuracy']:.1f}%, quasi-global momentum "
        f"(qg-dsgdm-n) {quasi['accuracy']:.1f}%, with the same messages.\nAccuracy is the mean of the nodes' own "
        f"models, ± std over {setting.seeds} seeds; learning rates are chosen on another seed; sgdm-n is centralized."
    )
    written = plots.save(demonstration.draw(setting, outcomes), out, "demo")
    write_csv(out / "demo.csv", rows)
    _say_written([*written, out / "demo.csv", out / "runs"])


@app.command
def topology(graph: Graph, plot: File | None = None, parameters: int = 272_474) -> None:
    """Print what a topology is worth, and draw it.

    Args:
        graph: ring:16, torus:16, complete:4, star:5, social, one-peer-exponential:16, file:graph.edgelist,
            every:4/ring:16 (gossip each 4th step), lazy/ring:16 ((I + W)/2).
        plot: Draw the graph into this file (.png, .svg or .pdf).
        parameters: The size of the model for the traffic; the default is a ResNet-20.
    """
    if parameters < 1:
        raise qg.InputError(f"parameters must be >= 1, got {parameters}")
    chosen = qg.topology.parse(graph)
    table = Table(show_header=False, box=None)
    sent = f"{chosen.bytes_per_step(parameters) / 1e6:.3f} MB a node on average, for {parameters:,} float32 parameters"
    for name, value in (_facts(chosen) | {"sent a step": sent}).items():
        table.add_row(name, value)
    console.print(table)
    if plot is not None:
        with plots.style():
            figure, (panel,) = plots.panels(1, 1, 5, 5)
            plots.draw_topology(chosen, panel)
            panel.set_title(str(chosen))
        plots.save_as(figure, plot)
        _say_written([plot])


def _facts(graph: qg.Topology) -> dict[str, str]:
    def number(value: float | None, otherwise: str) -> str:
        return otherwise if value is None else f"{value:.6g}"

    beta = number(graph.largest_beta, "unknown")
    degrees = [len(graph.neighbours(i)) for i in range(graph.n)]
    symmetric = "only for a fixed symmetric W"
    return {
        "topology": str(graph),
        "nodes n": str(graph.n),
        "edges": f"{len(graph.edges)}, {'undirected' if graph.is_symmetric else 'directed'}",
        "neighbours": f"{min(degrees)} to {max(degrees)}" if len(set(degrees)) > 1 else str(degrees[0]),
        "period": str(graph.period),
        "symmetric": "yes" if graph.is_symmetric else "no",
        "doubly stochastic": _stochastic(graph),
        "λ₂": number(graph.lambda_2, symmetric),
        "λ_min": number(graph.lambda_min, symmetric),
        "ρ": number(graph.rho, "only for a doubly stochastic W"),
        "largest β in theory": f"{beta}  (β/(1 − β) ≤ ρ/21; practice uses 0.9)",
    }


def _stochastic(graph: qg.Topology) -> str:
    if graph.is_doubly_stochastic:
        return "yes"
    return "no: there are negative weights" if graph.keeps_mean else "no: the nodes' mean drifts"


@app.command
def algorithms(name: Name = None, markdown: bool = False, check: bool = False) -> None:
    """List the algorithms: traffic, memory, what they need of W; or explain one.

    Args:
        name: An algorithm, with or without options, or your own as package.module:Name.
        markdown: Print the list as a Markdown table.
        check: Run the battery of checks on the algorithm.
    """
    if name is None:
        entries = catalogue()
        if check:
            for entry in entries:
                console.print(f"{entry.name}: {len(qg.check_algorithm(entry.name))} checks passed")
        elif markdown:
            print(_as_markdown(entries))
        else:
            console.print(_as_table(entries))
        return
    chosen = qg.algorithm(name)
    if check:
        passed = qg.check_algorithm(chosen)
        console.print(f"{name} passed {len(passed)} checks: {', '.join(passed)}")
        return
    entry = describe(name)
    print(f"{name}  {entry.citation}\n{chosen!r}")
    part: qg.Algorithm | None = chosen
    while part is not None:
        print(f"\n{inspect.getdoc(type(part))}")
        part = getattr(part, "base", None)
    print()
    for what, cell in zip(COLUMNS[1:4], entry.cells[1:4], strict=True):
        print(f"{what}: {cell}")


UNITS = (
    "Traffic and memory in multiples of the model: sent to each neighbour, or `to all` for an exact mean. "
    "`qg algorithms NAME` explains one."
)
COLUMNS = ("algorithm", "traffic a step", "extra memory", "needs of W", "from")


def _as_table(entries: list[Entry]) -> Table:
    table = Table(*COLUMNS, caption=UNITS)
    for entry in entries:
        table.add_row(*entry.cells)
    return table


def _as_markdown(entries: list[Entry]) -> str:
    return markdown_table(COLUMNS, [[f"`{entry.name}`", *entry.cells[1:]] for entry in entries])


Flat = Annotated[Experiment, tyro.conf.arg(name="")]
Around = Annotated[Options, tyro.conf.arg(name="")]


NOTHING, HERE, THREE_SEEDS = Experiment(), Options(), Options(seeds=3)


@app.command
def reproduce(
    name: Annotated[Positional[str | None], arg(metavar="TARGET")] = None,
    listing: Annotated[bool, arg(name="list")] = False,
    scale: Scale = "paper",
    cells: Annotated[tuple[str, ...], arg(metavar="GLOB...")] = (),
    tune_short: bool = False,
    out: Folder = Path("out"),
    options: Around = THREE_SEEDS,
) -> None:
    """Make a table or figure of the paper: run what the store lacks of it, and show ours beside the paper's numbers.

    Learning rates are tuned on seed 0. Run again, it goes on where it stopped. Without a name, list all targets.

    Args:
        name: A table, such as cifar10, or a figure, such as figure-2d.
        listing: List the targets: cells, what the store has, what is to be run and about how long it takes here.
        scale: smoke shows in minutes on a CPU that all works, with digits; short has a tenth of the epochs.
        cells: Only the cells whose name fits one of these, as in 'QG-*ring 16*0.1'; or the name of their run of seed 0
            at the paper's scale, with * for the hash.
        tune_short: Tune on runs of a tenth of the epochs, which is said beside the results. Such rates may be too
            small for the whole run; without this option the cells are tuned again, over all epochs.
        out: The folder for a figure's PNG, SVG and CSV.
    """
    _on_the_simulator("reproduce", options)
    if name is not None and name not in TARGETS:
        raise unknown("target", name, TARGETS)
    if listing or name is None:
        if cells:
            raise qg.InputError("--list shows whole targets; leave out --cells")
        console.print(_targets([name] if name else list(TARGETS), scale, options, tune_short))
        return
    table = TARGETS[name].table
    if cells and (table is None or not table.cells):
        raise qg.InputError(f"{name} has no cells to choose from; leave out --cells")
    if table is None:
        with console.status(f"making {name}"):
            made, written = make_figure(name, out)
        console.print(made.says)
        _say_written(written)
        return
    found: list[Outcome] = []
    if table.cells:
        with _watcher(options.log) as watch:
            found = run_table(table, scale, options.seeds, cells, options, watch, tune_short)
        lacking = [one.cell for one in found if len(one.runs) < options.seeds]
        for sentence in missing_data(lacking, scale, options.data_dir).values():
            console.print(f"data missing: {sentence}", soft_wrap=True)
    if name in TABLES:
        console.print(_beside_the_paper(table, found, scale))
        for note in table.notes:
            console.print(f"note: {note}")
        return
    made = draw_trained(name, options.runs, scale, options.data_dir)
    console.print(made.says)
    _say_written(write_figure(made, name, out))


def _on_the_simulator(command: str, options: Options) -> None:
    """Refuse what would be trained otherwise than was asked for."""
    if options.engine != "simulator":
        raise qg.InputError(f"qg {command} trains on the simulator; leave out --engine distributed")


def _targets(names: Sequence[str], scale: Scale, options: Options, tune_short: bool) -> Table:
    """Every target with its cells, what the store has of them, and what the rest takes."""
    store, device = ended(options.runs), choose_device(options.device)
    speeds = recorded(store, device)
    caption = (
        f"At {scale} scale with {options.seeds} seeds. A grid of learning rates may grow beyond the runs counted here; "
        f"times are from the store's runs of such models on {device.type}, else from a few plain steps."
    )
    missing = Column("data missing", overflow="fold")
    table = Table(Column("target", no_wrap=True), "cells", "tried", "done", "runs left", "about", missing)
    table.caption = caption
    if console.width >= WIDE:
        table.add_column("shows")
    for name in names:
        target = TARGETS[name]
        shows = (target.title,) * (console.width >= WIDE)
        if target.table is None or not target.table.cells:
            lost = absent(target.data if scale != "smoke" else (), options.data_dir)
            table.add_row(name, "-", "-", "-", "-", "seconds", ", ".join(lost), *shows)
            continue
        at = stand(target.table, store, scale, options.seeds, options.data_dir, tune_short)
        with console.status(f"estimating {name}"):
            seconds, everything = cost(at.to_run, device, speeds)
        about = _duration(seconds) if everything else f"over {_duration(seconds)}" if seconds else "unknown"
        counts = (at.cells, at.tried, at.done, len(at.to_run))
        table.add_row(name, *map(str, counts), about, ", ".join(at.missing), *shows)
    return table


WIDE = 130
"""Columns of a terminal from which on a sentence fits beside the numbers."""


def _beside_the_paper(table: Targeted, found: Sequence[Outcome], scale: Scale) -> Table:
    """A line for each cell: the paper's number, ours, and how it came about."""
    further = ("best epoch", "averaged") if console.width >= WIDE else ()
    numbers = (Column(name, no_wrap=True) for name in ("paper", "ours", "ours −\npaper", "seeds"))
    names = (Column(name, overflow="fold") for name in ("row", "column"))
    rate = Column("lr", overflow="fold")
    shown = Table(*names, *numbers, rate, *(Column(name, no_wrap=True) for name in further))
    shown.title = table.title_at(scale)
    for one in found:
        difference = one.difference if scale != "smoke" else None
        nothing = NOT_CONVERGED if one.diverged else "-"
        last, *others = (str(score or nothing) for score in (one.ours(), one.ours("best"), one.ours("averaged")))
        shown.add_row(
            one.cell.row, one.cell.column, str(one.cell.score or NOT_CONVERGED), last,
            "-" if difference is None else f"{difference:+.2f}", str(len(one.runs)),
            f"{one.experiment.peak_lr:g}, {one.how}" if one.runs else one.how, *(others if further else ()),
        )
    return shown


def train(
    file: Toml = None,
    experiment: Flat = NOTHING,
    options: Around = HERE,
) -> None:
    """Train one model per node; run it again and it goes on where it stopped, or says that it is finished.

    Args:
        file: A TOML file with any of the options below, as in `qg train --lr 0.2 mine.toml`; flags win.
    """
    _check_toml(file)
    if options.engine == "distributed" and options.processes and not launched():
        refuse_faults(experiment)
        spread(qg.topology.parse(experiment.topology).n, options.processes)     # refuses too many, once
        sys.exit(launch(sys.argv[1:], options.processes))
    chosen = Run.of(experiment, options.runs)
    finished = chosen.summary is not None
    peak = experiment.peak_lr
    start = experiment.warmup_from
    warm = f" from {start:g} over {experiment.warmup:g} epochs" if peak > start and experiment.warmup else ""
    decays = ", ".join(f"{fraction:g}" for fraction in experiment.milestones)
    if not finished:
        decay = f", × {experiment.decay:g} after {decays} of the run" if decays else ""
        console.print(f"learning rate {peak:g}{warm}{decay}")
    with _watcher(options.log) as watch:
        if options.engine == "distributed":
            runs = train_part(experiment, options, watch)
        else:
            runs = sweep([experiment], options, watch)
    if finished:
        console.print(f"{chosen.folder} is finished already")
    console.print(_comparison(runs))
    console.print("runs: " + ", ".join(str(run.folder) for run in runs))


@contextmanager
def _watcher(log: str) -> Iterator[Watcher]:
    """A progress bar on a terminal and a line for each test elsewhere, or a JSON object for each epoch on stderr."""
    to = logging.getLogger("quasiglobal")
    if log == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(_JsonLines())
        to.addHandler(handler)
        to.setLevel(logging.INFO)
    with _progress() as progress:
        bar = progress.add_task("", total=None)

        def watch(runs: Sequence[Run], records: list[Record]) -> None:
            record, names = records[0], {run.experiment.algorithm for run in runs}
            what = names.pop() if len(names) == 1 else f"{len(runs)} runs"
            losses, accuracies = ([r[name] for r in records if r.get(name) is not None] for name in MEASURED)
            text = f"loss {statistics.fmean(losses):.3f}" if losses else "diverged"
            if accuracies:
                text += f"  accuracy {100 * statistics.fmean(accuracies):.1f}%"
            total = runs[0].experiment.epochs
            progress.update(bar, completed=record["epoch"], total=total, description=f"{what}  {text}")
            if log == "json":
                for run, measured in zip(runs, records, strict=True):
                    to.info("epoch %d", measured["epoch"], extra={"facts": {"run": run.folder.name} | measured})
            elif not console.is_terminal and accuracies:
                console.print(f"epoch {record['epoch']}: {text}, {record['images_per_second']:,.0f} examples/s")

        yield watch


MEASURED = ("loss", "accuracy")
"""What is said of an epoch; what a run that diverged has no number for is left out."""


class _JsonLines(logging.Formatter):
    """A JSON object a line: time, level, message, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        facts = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if "RANK" in os.environ:
            facts["process"] = int(os.environ["RANK"])
        return as_line(facts | getattr(record, "facts", {}))


@app.command
def node(
    file: Annotated[Positional[Path], arg(metavar="FILE.toml")],
    node: int,
    data: Annotated[str, arg(metavar="PATH")],
    rendezvous: Annotated[str, arg(metavar="HOST:PORT")],
    host: str = "127.0.0.1",
    runs: Folder = Path("runs"),
    device: str = "auto",
    peer_timeout: float = 60.0,
    patience: float = 3600.0,
    log: Literal["plain", "json"] = "plain",
) -> None:
    """Be one node of an experiment, with data of your own that nobody else sees.

    Every node is started by its owner, with the same experiment, on any machine that reaches its neighbours. The
    experiment says what all agree on: classes, shape, steps and, of images, mean and std. Started again, a node
    rejoins the others.

    Args:
        file: The experiment, the same file at every node.
        node: Which node of the topology this is, from 0.
        data: Your data: class folders of images, an .npz archive, or texts, as a .csv file or a folder with train.csv.
        rendezvous: Where the nodes meet: somebody's `qg rendezvous`.
        host: The address of this machine that neighbours reach it at.
        runs: The folder for this node's records and checkpoints.
        device: auto, cpu or cuda.
        peer_timeout: Seconds after which the node goes on without a neighbour that does not answer.
        patience: Seconds to wait for the neighbours at the start.
        log: Sentences, or a JSON object a line.
    """
    experiment = from_toml(file)
    options = Options(runs=runs, device=device, peer_timeout=peer_timeout, host=host, log=log)
    with _watcher(log) as watch:
        run = train_node(experiment, node, data, rendezvous, options, patience, watch)
    console.print(_comparison([run]))
    console.print(f"run: {run.folder}")


def check(
    file: Toml = None,
    experiment: Flat = NOTHING,
    options: Around = HERE,
) -> None:
    """Say what `qg train` with the same words will take, and warn of what will not go well. Nothing is written.

    Args:
        file: A TOML file with any of the options below; flags win.
    """
    _check_toml(file)
    graph = qg.topology.parse(experiment.topology)
    table = Table(show_header=False, box=None)
    for name, value in _facts(graph).items():
        table.add_row(name, value)
    with console.status("trying a few steps"):
        taken = estimate(prepare(experiment, options), options.runs)
    nodes = f"{graph.n} nodes" + (f" × {options.seeds} seeds" if options.seeds > 1 else "")
    peak = f", {_bytes(taken.peak)} of the GPU at the peak" if taken.peak else ""
    for name, value in {
        "model": f"{experiment.model}, {taken.parameters:,} parameters, {nodes}",
        "sent a step": f"{_bytes(taken.sent_a_step)} a node, {_bytes(taken.sent_a_step * taken.steps)} in all",
        "memory": f"{_bytes(taken.rows)} for models and momentum, {_bytes(taken.data)} for the data{peak}",
        "disk": f"{_bytes(taken.checkpoints)} for the checkpoints",
        "time": f"about {_duration(taken.seconds)}: {taken.steps:,} steps of {1000 * taken.step_seconds:.3g} ms, "
        f"and a test every {experiment.eval_every} epochs",
    }.items():
        table.add_row(name, value)
    console.print(table)


def tune(
    file: Toml = None,
    experiment: Flat = NOTHING,
    options: Around = HERE,
    over: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME=VALUES")] = (),
    cap: int = CAP,
    plot: File | None = None,
) -> None:
    """Find the best learning rate, or any other numbers, on a grid that grows until the best lies inside of it.

    The trials have the experiment's seed; then all --seeds run at the best. What is in the store is not run again.

    Args:
        file: A TOML file with any of the options below; flags win.
        over: What to tune and its values, as in lr=0.1,0.2,0.4,beta=0.8,0.9 or as an --over each: fields of the
            experiment or options of the algorithm, all combinations. By default, and as a bare lr, three rates around
            the experiment's own.
        cap: The grid does not grow beyond this many trials; 0: it stays as given.
        plot: Draw the grid into this file (.png, .svg or .pdf): a curve over one name, a heat map over two.
    """
    _on_the_simulator("tune", options)
    _check_toml(file)
    names = parse_over(",".join(over or ("lr",)))
    if plot is not None:
        plots.check_drawable(plot, names)
    with _watcher(options.log) as watch:
        (tuned,) = tune_experiments([experiment], names, options, cap, watch)
    console.print(_grid(tuned))
    best = ", ".join(f"{name} = {value:g}" for name, value in zip(tuned.grid, tuned.best, strict=True))
    inside = "" if tuned.inside else f"; it lies at an end of the grid: raise --cap above {cap}, or give other values"
    said = f"best: {best}, of {len(tuned.trials)} trials with seed {experiment.seed}{inside}"
    if not any(map(math.isfinite, tuned.scores.values())):
        said = f"all {len(tuned.trials)} trials diverged; give other values with --over"
    console.print(said, soft_wrap=True)
    console.print(_comparison(tuned.runs))
    if plot is not None:
        plots.save_as(plots.draw_tuning(tuned.grid, tuned.scores, tuned.best), plot)
        _say_written([plot])


def _grid(tuned: Tuned) -> Table:
    """The accuracy at every point, the best marked: the second of two names across."""
    def cell(point: tuple[float, ...]) -> str:
        reached = tuned.scores[point]
        text = f"{100 * reached:.2f}" if math.isfinite(reached) else "diverged"
        return f"{text} ← best" if point == tuned.best and math.isfinite(reached) else text

    names = list(tuned.grid)
    if len(names) != 2:
        table = Table(*names, "accuracy, %")
        for point in sorted(tuned.trials):
            table.add_row(*(f"{value:g}" for value in point), cell(point))
        return table
    rows, columns = tuned.grid.values()
    table = Table(names[0], *(f"{names[1]} = {value:g}" for value in columns), title="accuracy, %")
    for low in rows:
        table.add_row(f"{low:g}", *(cell((low, high)) for high in columns))
    return table


def _bytes(count: float) -> str:
    """A size for people.

    >>> _bytes(1_090_000), _bytes(999.6e6)
    ('1.09 MB', '1 GB')
    """
    unit = 0
    while count >= 999.5 and unit < 4:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def _duration(seconds: float) -> str:
    """A time for people.

    >>> _duration(42.4), _duration(90), _duration(7_000), _duration(1e6)
    ('42 s', '2 min', '1.9 h', '12 days')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:,.0f} days"


@app.command
def runs(runs: Folder = Path("runs")) -> None:
    """List the runs and how they ended.

    Args:
        runs: The folder of all runs.
    """
    table = Table(Column("run", overflow="fold"), "status", "epochs", "accuracy, %", "best")
    for run in find(runs):
        records = run.records
        scores = [f"{100 * test['accuracy']:.2f}" if test else "" for test in last_and_best(records)]
        table.add_row(run.folder.name, run.status, f"{len(records)}/{run.experiment.epochs}", *scores)
    console.print(table)


@app.command
def status(folder: Annotated[Positional[Path], arg(metavar="RUN")]) -> None:
    """Show how far each process of a distributed run is, what its edges have carried, and which it has lost.

    Args:
        folder: A run's folder.
    """
    parts = parts_of(Run.at(folder).folder)
    if not parts:
        raise qg.InputError(f"{folder} has no parts: it was not trained over processes")
    newest = [measured[-1] if (measured := part.measures) else None for part in parts]
    furthest = max((last["step"] for last in newest if last), default=0)
    counted = ("process", "nodes", "epoch", "step", "behind", "loss")
    table = Table(*counted, "sent", "waited", "heard of", "lost edges", "status")
    for part, last in zip(parts, newest, strict=True):
        nodes = f"{part.nodes[0]}-{part.nodes[-1]}" if len(part.nodes) > 1 else str(part.nodes[0])
        cells = ["-"] * 8
        if last:
            lost = ", ".join(f"{there}: {why}" for there, why in last["lost"].items()) or "none"
            cells = [
                str(last["epoch"]), str(last["step"]), str(furthest - last["step"]),
                f"{statistics.fmean(last['loss']):.3f}", *_carried(last["edges"]),
                f"{_duration(time.time() - last['written'])} ago", lost,
            ]
        table.add_row(part.folder.name, nodes, *cells, part.status or "training")
    console.print(table)


def _carried(edges: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """The bytes sent and the seconds waited, by the process at the other end."""
    sent = ", ".join(f"{there}: {_bytes(account['sent'])}" for there, account in edges.items())
    waited = ", ".join(f"{there}: {account['waited']:.1f} s" for there, account in edges.items())
    return sent, waited


@app.command
def rendezvous(port: int, host: str = "127.0.0.1") -> None:
    """Be the place where processes meet, until stopped: what MASTER_ADDR and MASTER_PORT name for torchrun's variables.

    Training that has begun does not need it; joining does.

    Args:
        port: The port to listen at.
        host: The address of this machine to listen at; by default it can be reached from here alone.
    """
    server = serve(host, port)
    console.print(f"listening at {host}:{server.port}; stop with Ctrl-C")
    while True:
        time.sleep(3600)


@app.command
def compare(folders: Folders = (), markdown: bool = False) -> None:
    """Print a table of runs, mean ± std over those that differ in their seed alone.

    Args:
        folders: Run folders; by default all of runs/.
        markdown: Print it as a Markdown table.
    """
    runs = _runs_at(folders)
    if markdown:
        print(markdown_table(COMPARED, _scores(runs)))
    else:
        console.print(_comparison(runs))


@app.command
def plot(folders: Folders = (), out: File = Path("out/curves.png")) -> None:
    """Draw the learning curves of runs.

    Args:
        folders: Run folders; by default all of runs/.
        out: The picture (.png, .svg or .pdf).
    """
    groups = group_by_setting(_runs_at(folders))
    curves = {label: [run.records for run in group] for label, group in groups.items()}
    algorithms = [group[0].experiment.algorithm for group in groups.values()]
    plots.save_as(plots.draw_curves(curves, algorithms), out)
    _say_written([out])


@app.command
def report(
    out: Folder = Path("out/report"),
    runs: Folder = Path("runs"),
    scale: Scale = "paper",
    format: Literal["all", "html", "markdown", "latex"] = "all",
) -> None:
    """Put the paper's tables and claims beside what the runs have reached: one page, Markdown and LaTeX.

    Args:
        out: The folder for index.html, tables.md and tables.tex.
        runs: The folder of all runs.
        scale: The runs of which scale, as `qg reproduce` made them.
        format: One format alone.
    """
    if not runs.is_dir():
        raise qg.InputError(f"there is no folder {runs}; name one with --runs, or run a table with `qg reproduce`")
    _say_written(summary.write(summary.document(runs, scale), out, summary.FORMATS if format == "all" else [format]))


@app.command
def data(name: Name = None, data_dir: Folder | None = None) -> None:
    """List the data sets: what is found where, and how to get the rest. With a name, describe one.

    Args:
        name: A data set, such as folder:PATH or csv:PATH; what several owners have to agree on is printed as an
            experiment has it.
        data_dir: Where to look; by default $QG_DATA or ./data.
    """
    if name is not None:
        one = raw(name, data_dir)
        published = (SOURCES | TEXT_SOURCES)[name].examples if ":" not in name else 0
        there = len(one.train) + len(one.test)
        subset = f", a subset of the {published:,} published" if there < published else ""
        print(f"# {one.name}: {len(one.train):,} training examples and {len(one.test):,} to test{subset}")
        if isinstance(one, Corpus):
            words = sorted(len(text.split()) for text in one.train.texts)
            print(f"# texts of {words[len(words) // 2]} words in the middle, {words[-1]} at most; shape is in tokens")
        for key, value in _terms(one).items():
            print(f"{key} = {json.dumps(value)}")
        return
    for found in available(data_dir):
        if found.where is None:
            console.print(f"{found.name}: not found. {found.steps}", soft_wrap=True)
        else:
            missing = f", but without {', '.join(found.missing)}. {found.steps}" if found.missing else ""
            console.print(f"{found.name}: {found.where}{missing}", soft_wrap=True)


def _terms(one: Dataset | Corpus) -> dict[str, object]:
    """What several owners of such data have to agree on."""
    if isinstance(one, Corpus):
        return {"classes": one.classes, "shape": [LENGTH]}
    return terms_of(one)


@app.command
def partition(
    name: Annotated[Positional[str], arg(metavar="DATA")],
    nodes: int = 16,
    alpha: tuple[float, ...] = (0.1,),
    kind: str = "dirichlet",
    seed: int = 0,
    data_dir: Folder | None = None,
    plot: File | None = None,
) -> None:
    """Show who holds what: mean label entropy, total-variation distance, and the paper's dots.

    Args:
        name: The data set, as `qg data` lists it.
        nodes: How many nodes.
        alpha: Dirichlet's concentration; several are drawn side by side.
        kind: dirichlet, dirichlet-plain, iid, shards:K or by:COLUMN.
        seed: The partition's seed.
        data_dir: Where the data sets lie.
        plot: Draw the dots into this file.
    """
    dataset = raw(name, data_dir)
    labels = dataset.train.y.numpy()
    counts = {}
    for value in alpha:
        parts = split(kind, labels, nodes, value, seed, dataset.train.columns)
        table = counts[f"{name}, n = {nodes}, α = {value:g}"] = class_counts(parts, labels, len(dataset.classes))
        entropy, distance = heterogeneity(table)
        console.print(
            f"{kind}, α = {value:g}: {nodes} nodes of {min(map(len, parts))} to {max(map(len, parts))} examples, "
            f"mean label entropy {entropy:.3f} nats (of {math.log(len(dataset.classes)):.3f}), "
            f"total-variation distance {distance:.3f}, fingerprint {fingerprint(parts)}",
            soft_wrap=True,
        )
    if plot is not None:
        plots.save_as(plots.draw_partitions(counts), plot)
        _say_written([plot])


@app.command
def export(
    folder: Annotated[Positional[Path], arg(metavar="RUN")],
    node: str = "average",
    out: File = Path("out/model.safetensors"),
    data_dir: Folder | None = None,
) -> None:
    """Write a run's model as a plain state_dict in safetensors.

    Args:
        folder: A run's folder.
        node: The node whose model it is, or average.
        out: The file.
        data_dir: Where the data sets lie.
    """
    run = Run.at(folder)
    save_model(export_model(run, node, data_dir), out)
    _say_written([out])


@app.command
def evaluate(
    file: Annotated[Positional[Path], arg(metavar="MODEL")], data: str | None = None, data_dir: Folder | None = None
) -> None:
    """Test an exported model.

    Args:
        file: What `qg export` wrote.
        data: Another data set than the model's own; of csv:FILE all rows count.
        data_dir: Where the data sets lie.
    """
    model = read_model(file)
    dataset = data_of(model.experiment, data_dir, data, testing=True)
    right = model.predict(dataset, dataset.test) == dataset.test.y
    console.print(f"{100 * right.double().mean():.2f}% of {len(right)} test examples of {dataset.name}")


@app.command
def predict(
    file: Annotated[Positional[Path], arg(metavar="MODEL")],
    data: Annotated[Positional[str], arg(metavar="DATA")],
    data_dir: Folder | None = None,
) -> None:
    """Print the class that an exported model gives each test example of a data set, or each line of a file of texts.

    Args:
        file: What `qg export` wrote.
        data: A data set, such as folder:PATH or csv:PATH, of which a file is taken whole and in its order; or PATH.txt,
            a text a line, and - for the standard input.
        data_dir: Where the data sets lie.
    """
    model = read_model(file)
    if data == "-" or data.endswith(".txt"):
        print(*model.classify(read_texts(data)), sep="\n")
        return
    if Path(data).is_file():
        raise qg.InputError(f"{data} is neither texts, PATH.txt, nor a data set; say what it is, as in csv:{data}")
    dataset = data_of(model.experiment, data_dir, data, testing=True)
    for label in model.predict(dataset, dataset.test).tolist():
        print(dataset.classes[label])


def _runs_at(folders: Sequence[Path]) -> list[Run]:
    found = [Run.at(folder) for folder in folders] or list(find(Path("runs")))
    if not found:
        raise qg.InputError("there are no runs in runs/; name run folders, or train some with `qg train`")
    return found


COMPARED = ("setting", "seeds", "accuracy, %", "best, %", "worst node", "averaged model", "status")


def _comparison(runs: Sequence[Run]) -> Table:
    table = Table(Column(COMPARED[0], overflow="fold"), *COMPARED[1:])
    for row in _scores(runs):
        table.add_row(*row)
    return table


def _order(one: Experiment) -> tuple[object, ...]:
    """For readers: alike experiments next to each other, numbers as such."""
    learner = (one.data, one.model, one.norm or "", one.algorithm)
    return *learner, one.topology, one.partition, one.alpha, one.epochs, one.peak_lr


def _scores(runs: Sequence[Run]) -> list[list[str]]:
    """Mean ± std over seeds of the last and of the best test; a seed that diverged makes it ⋆, as in the paper."""
    rows = []
    for label, group in sorted(group_by_setting(runs).items(), key=lambda item: _order(item[1][0].experiment)):
        lasts = [run.summary["last"] for run in group if run.summary and run.summary["last"]]
        bests = [run.summary["best"] for run in group if run.summary and run.summary["best"]]
        statuses = ", ".join(sorted({run.status for run in group}))
        columns = ((lasts, "accuracy"), (bests, "accuracy"), (lasts, "accuracy_worst"), (lasts, "accuracy_averaged"))
        cells = [_mean_std([100 * record[name] for record in records if name in record]) for records, name in columns]
        if any(run.status == "diverged" for run in group):
            cells = [NOT_CONVERGED] * len(cells)
        rows.append([label, str(len(group)), *cells, statuses])
    return rows


def _mean_std(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = statistics.mean(values)
    return f"{mean:.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def _from_file(words: Sequence[str]) -> Experiment:
    """The experiment of the TOML file among the words of `qg train`, for its flags to start from."""
    files = [word for word in words if word.endswith(".toml") and not word.startswith("-")]
    return from_toml(Path(files[0])) if files else Experiment()


def _check_toml(file: Path | None) -> None:
    """Refuse a word that would otherwise be passed over, as the last of `--pretrained false`."""
    if file is not None and file.suffix != ".toml":
        raise qg.InputError(f"{file} is no .toml file; switches take no value, as in --no-pretrained")


def main() -> None:
    """Run `qg`; bad input is one sentence and exit status 2, never a stack trace."""
    warnings.showwarning = lambda message, *rest: console.print(f"warning: {message}")
    sys.path.insert(0, os.getcwd())             # for algorithms of your own, as package.module:Name
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.argv[1:] == ["--version"]:
        print(f"qg {qg.__version__}")
        return
    try:
        for command in (train, check, tune):
            if sys.argv[1:2] == [command.__name__]:
                command.__defaults__ = (None, _from_file(sys.argv[2:]), *(command.__defaults__ or ())[2:])
            app.command(command)
        app.cli(prog="qg", description=qg.__doc__.splitlines()[0])
        sys.stdout.flush()
    except (qg.InputError, qg.CheckFailed, qg.Diverged) as error:
        print(f"qg: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("qg: stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                     # somebody closed the pipe, as `qg algorithms | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"qg: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def _progress() -> Progress:
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True)


def _say_written(paths: list[Path]) -> None:
    console.print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)
