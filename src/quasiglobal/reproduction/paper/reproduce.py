"""Run the experiments of the paper's tables that a store lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from quasiglobal.data.sources import available, raw
from quasiglobal.errors import InputError
from quasiglobal.reproduction.paper.cells import PaperCell, PaperTable, Scale, at_scale
from quasiglobal.reproduction.paper.outcomes import FEWEST_RATES, Outcome, chosen_short, outcomes
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunStore, Watcher, unwatched
from quasiglobal.runs.sweep import sweep
from quasiglobal.runs.tuning import CAP, rates_around, tune
from quasiglobal.training.experiment import Experiment


def run_missing(
    table: PaperTable,
    scale: Scale = "paper",
    seeds: int = 3,
    cells: Sequence[str] = (),
    options: Options | None = None,
    watch: Watcher = unwatched,
    tune_short: bool = False,
) -> list[Outcome]:
    """Run the missing experiments of a table, or of the cells that match the patterns; return the outcomes.

    Learning rates are tuned with seed 0; then all seeds run at the best rate. A rate that is already tuned in the store
    is reused. With `tune_short`, rates are tuned on short runs; otherwise rates from short runs are not reused. Cells
    whose data set is missing are not run; raise InputError if the store then has no run of any cell.
    """
    if tune_short and scale != "paper":
        raise InputError(f"--tune-short needs the paper's scale; with --scale {scale} leave it out")
    options = replace(options or Options(), seeds=seeds)
    chosen = select(table, cells)
    part = replace(table, cells=tuple(chosen))
    lost = missing_data(chosen, scale, options.data_dir)

    def wanted(store: RunStore, scale: Scale) -> list[Outcome]:
        return [one for one in outcomes(part, store, scale, short=False) if one.experiment.data not in lost]

    tried: Scale = "short" if tune_short else scale
    store = RunStore.read(options.runs)
    settled = [one.cell.name for one in wanted(store, scale) if one.fixed or one.tuned] if tune_short else []
    untuned = [one for one in wanted(store, tried) if one.cell.name not in settled]
    if grids := _grids(untuned, tried):                     # all cells at once, so that their trials fill programs
        over = [{"lr": rates} for rates in grids.values()]
        tune(list(grids), over, replace(options, seeds=1), FEWEST_RATES if scale == "smoke" else CAP, watch)
    store = RunStore.read(options.runs)
    rated = wanted(store, scale)
    if tune_short:
        rated = [one if one.cell.name in settled else chosen_short(one.cell, store) or one for one in rated]
    lacking = [experiment for one in rated for experiment in seeds_to_run(one, seeds)]
    sweep(list(dict.fromkeys(lacking)), replace(options, seeds=1), watch)
    found = outcomes(part, RunStore.read(options.runs), scale)
    if lost and not any(one.runs for one in found):
        raise InputError("; ".join(lost.values()))
    return found


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
                start = one.cell.rates or rates_around(experiment.peak_lr)
                grids[experiment] = tuple(sorted({*grids.get(experiment, ()), *start, *one.trials}))
    return grids


def seeds_to_run(one: Outcome, seeds: int) -> list[Experiment]:
    """A cell's experiment with each seed that the store lacks; empty if no learning rate has been chosen yet."""
    if not one.fixed and not one.trials:
        return []
    first, have = one.experiment.seed, {run.experiment.seed for run in one.runs}
    return [one.experiment.with_seed(seed) for seed in range(first, first + seeds) if seed not in have]


