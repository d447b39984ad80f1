"""The commands `qg reproduce` and `qg report`: targets, their progress in a store, and the training of missing runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import Around, Folder, Json, call, only_simulated, store_at
from quasiglobal.cli.terminal import (
    WIDE,
    Listing,
    Values,
    console,
    log_as,
    preparing,
    print_json,
    say_utilisation,
    say_written,
    time_in_words,
    watcher,
)
from quasiglobal.data.sources import SOURCES, available, raw
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.paper import figures
from quasiglobal.reproduction.paper.figures import PARTITIONS, TRAINED, Reproduced
from quasiglobal.reproduction.paper.outcomes import FEWEST_RATES, Outcome, chosen_short, outcomes, trial_of
from quasiglobal.reproduction.paper.summary import left_out, summary
from quasiglobal.reproduction.paper.tables import NUMBERS, TABLES, PaperCell, PaperTable, Scale, at_scale
from quasiglobal.reproduction.paper.toy import FIGURES, make_figure
from quasiglobal.reproduction.report.formats import FORMATS, write_report
from quasiglobal.runs.comparison import NOT_CONVERGED, Score
from quasiglobal.runs.estimate import images_per_second
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import Run, RunStore, Watcher, unwatched
from quasiglobal.runs.sweep import sweep
from quasiglobal.runs.tuning import CAP, rates_around, tune
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import number


@dataclass(frozen=True)
class Target:
    """A table or figure of the paper."""

    name: str
    title: str
    table: PaperTable | None = None
    """The cells to train; None for a figure without training, which takes seconds."""
    drawn: bool = False
    """Whether it is a figure."""
    data: tuple[str, ...] = ()
    """Data sets shown by a figure without cells, at any scale but smoke."""

    @property
    def number(self) -> str:
        """The paper's number of the table or figure; empty if it is not in the paper."""
        return NUMBERS.get(self.name, "")

    @property
    def heading(self) -> str:
        """The paper's number and the title."""
        return self.numbered(self.title)

    def numbered(self, title: str) -> str:
        """A form of the title, with the paper's number in front.

        >>> TARGETS["cifar10"].numbered("CIFAR-10"), TARGETS["figure-speedup"].numbered("Speed-up")
        ('Table 1: CIFAR-10', 'Not in the paper: Speed-up')
        """
        return f"{self.number or 'Not in the paper'}: {title.replace(f' ({self.number})', '')}"

    @property
    def kind(self) -> str:
        """Group of similar targets."""
        if not self.drawn:
            return "Tables"
        return "Figures from training runs" if self.table and self.table.cells else "Figures made in seconds"


TARGETS: dict[str, Target] = {
    **{name: Target(name, table.title, table) for name, table in TABLES.items()},
    **{name: Target(name, figure.table.title, figure.table, drawn=True) for name, figure in TRAINED.items()},
    **{name: Target(name, (make.__doc__ or "").splitlines()[0], drawn=True) for name, make in FIGURES.items()},
}
SHOWN_DATA = tuple(dict.fromkeys(data for _, data, *_ in PARTITIONS))
TARGETS["figure-partition"] = replace(TARGETS["figure-partition"], data=SHOWN_DATA)
"""All targets of `qg reproduce` by name."""


# ------------------------------------------------------------------------------------------------ the commands

THREE_SEEDS = Options(seeds=3)

VALUES = {"reproduce TARGET": tuple(TARGETS)}
"""Values of positional arguments, for `qg completion`."""


def reproduce(
    name: Annotated[Positional[str | None], arg(metavar="TARGET")] = None,
    listing: Annotated[bool, arg(name="list")] = False,
    scale: Scale = "paper",
    cells: Annotated[tuple[str, ...], arg(metavar="GLOB...")] = (),
    tune_short: bool = False,
    out: Folder = Path("out"),
    options: Around = THREE_SEEDS,
    json: Json = False,
) -> None:
    """Make a table or figure of the paper: run the missing experiments, and compare our numbers with the paper's.

    Learning rates are tuned on held-out training examples, with a seed that is not reported. Run the same command again
    to resume. Without a name, list all targets.

    Args:
        name: A table, such as cifar10, or a figure, such as figure-2d.
        listing: List the targets: their cells, the finished and the missing runs, and an estimate of the time.
        scale: paper: as in the paper; short: a tenth of the epochs; smoke: a quick test on digits, on a CPU.
        cells: Only the cells whose name matches one of these patterns, as in 'QG-*ring 16*0.1'.
            A pattern may also match the name of the cell's run with seed 0 at the paper's scale; write * for the hash.
        tune_short: Tune on runs of a tenth of the epochs, and mark the results.
            Such rates may be too small for the whole run. Without this option these cells are tuned again, over all
            epochs.
        out: The folder for a figure's PNG, SVG and CSV files.
    """
    only_simulated("reproduce", options)
    if name is not None and name not in TARGETS:
        raise unknown("target", name, TARGETS)
    if listing or name is None:
        if cells:
            raise InputError("--list shows whole targets; leave out --cells")
        _targets([name] if name else list(TARGETS), scale, options, tune_short).show(json)
        return
    if json and options.log == "json":
        raise InputError("--json and --log json both write to standard output; leave one out")
    table = TARGETS[name].table
    if cells and (table is None or not table.cells):
        raise InputError(f"{name} has no cells to choose from; leave out --cells")
    if table is None:
        with console.status(f"making {name}"):
            made, written = make_figure(name, out)
        _say_made(TARGETS[name], TARGETS[name].heading, made, written, json)
        return
    log_as(options.log)
    store = RunStore.read(options.runs)
    if table.cells:
        began, measured = time.time(), options.utilisation or Path(f"{options.runs.resolve()}-utilisation.jsonl")
        options = replace(options, utilisation=measured)
        part = replace(table, cells=tuple(select(table, cells)))
        at = stand(part, store, scale, options.seeds, options.data_dir, tune_short)
        needed = sum(one.data not in at.missing for one in at.to_run)           # a grid may need more
        with watcher(options.log, needed) as watch:
            found, store = complete(table, store, scale, options.seeds, cells, options, watch, tune_short)
        if not json:
            say_utilisation(measured, began)
        lacking = [one.cell for one in found if len(one.runs) < options.seeds]
        for sentence in missing_data(lacking, scale, options.data_dir).values():
            console.print(f"data missing: {sentence}", soft_wrap=True)
        if not TARGETS[name].drawn:
            beside_the_paper(TARGETS[name], table, found, scale).show(json)
            for note in table.notes:
                console.print(f"note: {note}")
            return
    with preparing():
        made = figures.draw_from_store(name, store, scale, options.data_dir)
    heading = TARGETS[name].numbered(figures.title_of(name, scale))
    _say_made(TARGETS[name], heading, made, figures.write_figure(made, name, out), json)


def _say_made(target: Target, heading: str, made: Reproduced, written: Sequence[Path], json: bool) -> None:
    """Print what a figure shows, and its files."""
    if json:
        print_json({
            "target": target.name, "number": target.number or None, "title": heading, "text": made.says,
            "files": list(map(str, written)), "rows": made.rows,
        })
    else:
        console.print(f"{heading}. {made.says}")
    say_written(written)


def report(
    out: Folder = Path("out/report"),
    runs: Folder = Path("runs"),
    scale: Scale = "paper",
    format: Literal["all", "html", "markdown", "latex", "svg"] = "all",
) -> None:
    """Compare the paper's tables and claims with the results of your runs: an HTML page, Markdown, LaTeX and SVG.

    Args:
        out: The folder for index.html, tables.md, tables.tex and grid.svg, a picture of all cells by agreement.
        runs: The folder of all runs.
        scale: Compare the runs of this scale of `qg reproduce`.
        format: Write only this format.
    """
    store = store_at(runs, "qg reproduce")
    say_written(write_report(summary(store, scale), out, FORMATS if format == "all" else [format]))
    for sentence in left_out(store, scale):
        console.print(f"not shown: {sentence}", soft_wrap=True)


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    call({"reproduce": reproduce, "report": report}, name, words)


# ------------------------------------------------------------------------------------------------ their tables


def _targets(names: Sequence[str], scale: Scale, options: Options, tune_short: bool) -> Listing:
    """Every target with its cells, the finished and missing runs, and the estimated time of the missing runs."""
    fresh = options.runs == Options().runs and not options.runs.exists()        # nothing was run yet
    store = RunStore(options.runs, ()) if fresh else store_at(options.runs, "qg reproduce")
    device = choose_device(options.device)
    speeds = recorded(store, device)
    rows: list[Values] = []
    for target in (TARGETS[name] for name in names):
        row: Values = {"target": target.name, "number": target.number or None, "title": target.title}
        if target.table and target.table.cells:
            with console.status(f"estimating {target.name}"):
                at = stand(target.table, store, scale, options.seeds, options.data_dir, tune_short)
                seconds, everything = cost(at.to_run, device, speeds)
            row |= {"cells": at.cells, "tried": at.tried, "done": at.done, "runs_left": len(at.to_run)}
            row |= {"seconds": seconds, "seconds_cover_all": everything, "data_missing": list(at.missing)}
        else:                                                               # it needs no training: the counts are null
            row |= dict.fromkeys(("cells", "tried", "done", "runs_left", "seconds"))
            missing = absent(target.data if scale != "smoke" else (), options.data_dir)
            row |= {"seconds_cover_all": True, "data_missing": missing}
        rows.append(row)
    return Listing(
        rows,
        {"target": lambda row: f"{row['target']}  {TARGETS[row['target']].heading}"},
        group=lambda row: TARGETS[row["target"]].kind,
        brief=_target_in_words,
        caption=f"At {scale} scale with {options.seeds} seeds. Learning-rate grids may grow beyond the runs counted "
        f"here; times are estimated from stored runs of the same model on {device.type}, else from a few plain steps.",
    )


def _target_in_words(row: Values) -> str:
    text = "takes seconds"
    if row["cells"] is not None:
        text = f"{row['done']} of {row['cells']} cells done, {row['tried']} tried; {row['runs_left']} runs left"
        if row["seconds"]:
            text += f", {'about' if row['seconds_cover_all'] else 'over'} {time_in_words(row['seconds'])}"
        elif row["runs_left"]:
            text += ", time unknown"
    return text + (f"; data missing: {', '.join(row['data_missing'])}" if row["data_missing"] else "")


def beside_the_paper(target: Target, table: PaperTable, found: Sequence[Outcome], scale: Scale) -> Listing:
    """One row per cell: the paper's number, ours, and how the learning rate was found."""
    texts = {one.cell.name: _outcome_texts(one, scale) for one in found}

    def text(name: str) -> Callable[[Values], str]:
        return lambda row: texts[row["cell"]][name]

    further = ("averaged",) if console.width >= WIDE else ()
    shown = {name: text(name) for name in ("paper", "ours (seeds)", "best", "ours −\npaper", "lr", *further)}
    if console.width < ROOMY:
        shown["best"] = lambda row: texts[row["cell"]]["best"].partition(" ± ")[0]
    return Listing(
        [_outcome_values(one, scale) for one in found],
        {"method": "method", **shown},
        title=target.numbered(table.title_at(scale)),
        group=lambda row: ", ".join(filter(None, (row["model"], row["column"]))),
        folds={"method": 13, "lr": 9},
        brief=lambda row: ", ".join(
            f"{name.removesuffix(' (seeds)')} {said}" for name, said in texts[row["cell"]].items()
            if name in BRIEF and said != "-"
        ),
    )


ROOMY = 100
"""Width of a terminal with room for the standard deviation of the best epoch."""

BRIEF = ("paper", "ours (seeds)", "best", "lr")
"""Columns on a narrow terminal."""


def _outcome_texts(one: Outcome, scale: Scale) -> dict[str, str]:
    nothing = NOT_CONVERGED if one.diverged else "-"
    last, best, averaged = (str(one.ours(which) or nothing) for which in ("last", "best", "averaged"))
    difference = one.difference if scale != "smoke" else None
    return {
        "paper": str(one.cell.score or NOT_CONVERGED),
        "ours (seeds)": f"{last} ({len(one.runs)})" if one.runs else last,
        "ours −\npaper": "-" if difference is None else f"{difference:+.2f}",
        "lr": f"{one.experiment.peak_lr:g}, {one.how}" if one.runs else one.how,
        "best": best,
        "averaged": averaged,
    }


def _outcome_values(one: Outcome, scale: Scale) -> Values:
    """A cell versus the paper as raw values; scores are in per cent, as in the paper."""
    def percent(name: str, score: Score | None) -> dict[str, float | None]:
        return {f"{name}_percent": score.mean if score else None, f"{name}_std_percent": score.std if score else None}

    return {
        "cell": one.cell.name, "model": one.cell.row.model, "method": one.cell.row.method,
        "column": str(one.cell.column), **percent("paper", one.cell.score), **percent("ours", one.ours()),
        "difference_percent": one.difference if scale != "smoke" else None, "seeds": len(one.runs),
        "diverged": one.diverged, "lr": one.experiment.peak_lr if one.runs else None, "lr_found": one.how,
        **percent("best_epoch", one.ours("best")), **percent("averaged", one.ours("averaged")),
    }


# ------------------------------------------------------------------------------------------------ progress and cost


@dataclass(frozen=True)
class Stand:
    """Progress of a target in a store."""

    cells: int
    tried: int
    """Number of cells with an ended run."""
    done: int
    """Number of cells with all seeds, at the paper's fixed learning rate or the best of three or more."""
    to_run: tuple[Experiment, ...]
    """One experiment per missing run; more are needed if a grid has to grow."""
    missing: tuple[str, ...]
    """Data sets that are not on disk."""


def stand(
    table: PaperTable,
    store: RunStore,
    scale: Scale,
    seeds: int,
    data_dir: Path | None = None,
    short: bool = False,
) -> Stand:
    """Progress of a table in a store; `short`: whether a learning rate from short runs counts."""
    found = outcomes(table, store, scale, short)
    lacking = [_to_run(one, scale, seeds) for one in found]
    once = {one.cell.experiment: several for one, several in zip(found, lacking, strict=True)}  # cells may share it
    return Stand(
        cells=len(found),
        tried=sum(bool(one.trials) for one in found),
        done=sum(not several for several in lacking),
        to_run=tuple(experiment for several in once.values() for experiment in several),
        missing=tuple(absent(data_names(table.cells, scale), data_dir)),
    )


Speeds = Mapping[Experiment, float]
"""Images per second, by the fields of an experiment that matter most (`_alike`)."""


def cost(experiments: Iterable[Experiment], device: torch.device, speeds: Speeds) -> tuple[float, bool]:
    """Estimate the seconds that runs take on this device, and whether the estimate covers all: text data is left out.

    The time is images / speed. The speed is that of recorded runs of the same model (`recorded`), or else that of a
    measured plain step. A data set's `examples` include test images, which account for the tests.
    """
    seconds, everything = 0.0, True
    for one in experiments:
        if one.data in SHOWN:
            alike = _alike(one)
            seconds += one.epochs * SOURCES[one.data].examples / (speeds.get(alike) or _speed(alike, device))
        else:
            everything = False
    return seconds, everything


def _alike(one: Experiment) -> Experiment:
    """The fields that the speed depends on most."""
    return Experiment(data=one.data, model=one.model, width=one.width, precision=one.precision)


def recorded(store: RunStore, device: torch.device) -> Speeds:
    """Speeds of the store's runs on this type of device: the median for each kind of model."""
    found: dict[Experiment, list[float]] = {}
    for run in store.runs:
        if run.summary and run.summary.device == device.type:
            speed = number(run.summary.last, "images_per_second")
            if speed:
                found.setdefault(_alike(run.experiment), []).append(speed)
    return {alike: statistics.median(speeds) for alike, speeds in found.items()}


SHOWN: dict[str, tuple[int, Sequence[int]]] = {
    "digits": (10, (1, 8, 8)), "cifar10": (10, (3, 32, 32)),
    "imagenet32": (1000, (3, 32, 32)), "imagenet": (1000, (3, 224, 224)),
}
"""Number of classes and input shape of each image data set, which need not be installed."""


@cache
def _speed(alike: Experiment, device: torch.device) -> float:
    """Measured speed of a model with its default norm; other norms differ little."""
    return images_per_second(alike, *SHOWN[alike.data], device)


def _to_run(one: Outcome, scale: Scale, seeds: int) -> list[Experiment]:
    """The cell's experiment once per missing run: the rates to try, then the other seeds at the best rate."""
    ended = len(one.trials) if one.held_out else 0
    trials = 0 if one.fixed or one.tuned else max(0, FEWEST_RATES * len(one.cell.experiments(scale)) - ended)
    return [one.experiment] * (trials + max(0, seeds - len(one.runs)))


# ------------------------------------------------------------------------------------------------ training


def run_missing(
    table: PaperTable,
    scale: Scale = "paper",
    seeds: int = 3,
    cells: Sequence[str] = (),
    options: Options | None = None,
    watch: Watcher = unwatched,
    tune_short: bool = False,
) -> list[Outcome]:
    """Run the missing experiments of a table, or of the cells that match the patterns; return the outcomes."""
    options = options or Options()
    return complete(table, RunStore.read(options.runs), scale, seeds, cells, options, watch, tune_short)[0]


def complete(
    table: PaperTable,
    store: RunStore,
    scale: Scale,
    seeds: int,
    cells: Sequence[str],
    options: Options,
    watch: Watcher = unwatched,
    tune_short: bool = False,
) -> tuple[list[Outcome], RunStore]:
    """Run the missing experiments of a table, or of the cells that match the patterns; return outcomes and new store.

    Learning rates are tuned on held-out examples (`trial_of`); then all seeds run at the best rate. A rate that is
    already tuned in the store is reused. With `tune_short`, rates are tuned on short runs; otherwise rates
    from short runs are not reused. Cells whose data set is missing are not run; raise InputError if the store then has
    no run of any cell.
    """
    if tune_short and scale != "paper":
        raise InputError(f"--tune-short needs the paper's scale; with --scale {scale} leave it out")
    chosen = select(table, cells)
    part = replace(table, cells=tuple(chosen))
    lost = missing_data(chosen, scale, options.data_dir)

    def wanted(store: RunStore, scale: Scale) -> list[Outcome]:
        return [one for one in outcomes(part, store, scale, short=False) if one.experiment.data not in lost]

    tried: Scale = "short" if tune_short else scale
    options = replace(options, seeds=1)
    settled = [one.cell.name for one in wanted(store, scale) if one.fixed or one.tuned] if tune_short else []
    untuned = [one for one in wanted(store, tried) if one.cell.name not in settled]
    if grids := _grids(untuned, tried):                     # all cells at once, so that their trials fill programs
        over = [{"lr": rates} for rates in grids.values()]
        tuned = tune(list(grids), over, options, FEWEST_RATES if scale == "smoke" else CAP, watch)
        store = _joined(store, [run for one in tuned for run in (*one.trials.values(), *one.runs)])
    rated = wanted(store, scale)
    if tune_short:
        rated = [one if one.cell.name in settled else chosen_short(one.cell, store) or one for one in rated]
    lacking = [experiment for one in rated for experiment in seeds_to_run(one, seeds)]
    store = _joined(store, sweep(list(dict.fromkeys(lacking)), options, watch))
    found = outcomes(part, store, scale)
    if lost and not any(one.runs for one in found):
        raise InputError("; ".join(lost.values()))
    return found, store


def _joined(store: RunStore, runs: Iterable[Run]) -> RunStore:
    """The store with runs that were trained since it was read."""
    found = {run.folder: run for run in (*store.runs, *runs)}
    return RunStore(store.root, tuple(found[folder] for folder in sorted(found)))


def select(table: PaperTable, patterns: Sequence[str]) -> list[PaperCell]:
    """The cells whose name or experiment name matches one of the patterns; all cells if there are no patterns.

    The experiment is at the paper's scale with seed 0. Its run folders have the same name except for the hash, which
    depends on the learning rate.

    >>> from quasiglobal.reproduction.paper.tables import TABLES
    >>> [cell.name for cell in select(TABLES["motivation"], ["qg-*ring 16*0.1", "*-dsgd-social-a10-*"])]
    ['DSGD | social 32, α = 10', 'QG-DSGDm-N | ring 16, α = 0.1']
    """
    def fits(cell: PaperCell, pattern: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for name in (cell.name, cell.experiment.name))

    for pattern in patterns:
        if not any(fits(cell, pattern) for cell in table.cells):
            without_hash = table.cells[0].experiment.name.rpartition("-")[0]
            raise InputError(
                f"no cell of {table.name} matches {pattern!r}; "
                f"names look like {table.cells[0].name!r} or {without_hash + '-*'!r}; * matches any text"
            )
    return [cell for cell in table.cells if not patterns or any(fits(cell, pattern) for pattern in patterns)]


def missing_data(cells: Iterable[PaperCell], scale: Scale, data_dir: Path | None) -> dict[str, str]:
    """The data sets that the cells need but that cannot be loaded, each with an error message on how to get it.

    A data set that is not on disk is requested from the hub, as in training.
    """
    lost = {}
    for name in absent(data_names(cells, scale), data_dir):
        try:
            raw(name, data_dir)
        except InputError as error:
            lost[name] = str(error)
    return lost


def data_names(cells: Iterable[PaperCell], scale: Scale) -> list[str]:
    """The data sets that the cells need."""
    return list(dict.fromkeys(at_scale(cell.experiment, scale).data for cell in cells))


def absent(names: Iterable[str], data_dir: Path | None) -> list[str]:
    """The data sets that are not on disk, or not complete."""
    here = {found.name for found in available(data_dir) if found.where is not None and not found.missing}
    return [name for name in names if name not in here]


def _grids(found: Iterable[Outcome], scale: Scale) -> dict[Experiment, tuple[float, ...]]:
    """The experiments still to tune, with their initial learning rates, which include those already tried."""
    grids: dict[Experiment, tuple[float, ...]] = {}
    for one in found:
        if not one.fixed and (not one.tuned or one.cell.algorithms):
            for experiment in one.cell.experiments(scale):
                known = one.experiment.peak_lr if one.trials else experiment.peak_lr
                tried = set(one.trials) if one.held_out else set()
                start = tried if len(tried) >= FEWEST_RATES else tried.union(one.cell.rates or rates_around(known))
                trial = trial_of(experiment)
                grids[trial] = tuple(sorted(start.union(grids.get(trial, ()))))
    return grids


def seeds_to_run(one: Outcome, seeds: int) -> list[Experiment]:
    """A cell's experiment with each seed that the store lacks; empty if no learning rate has been chosen yet."""
    if not one.fixed and not one.trials:
        return []
    first, have = one.experiment.seed, {run.experiment.seed for run in one.runs}
    return [one.experiment.with_seed(seed) for seed in range(first, first + seeds) if seed not in have]
