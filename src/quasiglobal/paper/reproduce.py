"""The paper's tables from the run store: what is there, what it says, and running what is missing.

The store is the only truth. The learning rate of a cell is the best of its trials: the ended runs of seed 0 that are
the cell's experiment but for the learning rate. `tuning.py` says what best means: by the accuracy of the last test, a
diverged run worse than any, of equals the smaller rate. Where too few rates were tried at the paper's scale, that of
runs at the short scale counts if the cell was run at it, and is marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from quasiglobal.algorithms import algorithm
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.data.sources import available, raw
from quasiglobal.errors import InputError
from quasiglobal.paper.published import Score
from quasiglobal.paper.tables import Cell, Scale, Table, at_scale
from quasiglobal.runs.local import Options, Run, Watcher, find
from quasiglobal.runs.sweep import sweep
from quasiglobal.runs.tuning import CAP, best_point, rates_around, score, tune
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment

Which = Literal["last", "best", "averaged"]
MEASURES: Mapping[Which, tuple[str, str]] = {
    "last": ("last", "accuracy"), "best": ("best", "accuracy"), "averaged": ("last", "accuracy_averaged"),
}
"""Where a summary has a score: the last test, the best one, or the last one of the nodes' averaged model."""

FEWEST_RATES = 3
"""Learning rates that must have been tried for the best of them to count as tuned."""


@dataclass(frozen=True)
class Outcome:
    """What the store has of a cell."""

    cell: Cell
    experiment: Experiment
    """At the scale asked for, with the best learning rate that was tried; the cell's own where none was."""
    runs: tuple[Run, ...]
    """The runs of this experiment that have ended, a seed each."""
    trials: Mapping[float, Run]
    """Seed 0 by learning rate, smallest first."""
    tuned_short: bool = False
    """Whether the trials have a tenth of the epochs."""

    @property
    def fixed(self) -> bool:
        """Whether the paper does not tune the learning rate here."""
        return self.cell.experiment.lr is not None

    @property
    def tuned(self) -> bool:
        """Whether at least three learning rates were tried and the best is neither the smallest nor the largest."""
        rates = list(self.trials)
        return len(rates) >= FEWEST_RATES and self.experiment.peak_lr in rates[1:-1]

    @property
    def how(self) -> str:
        """How its learning rate was found, in a few words."""
        if self.fixed:
            return "fixed"
        if not self.trials:
            return "not run"
        if len(self.trials) < FEWEST_RATES:
            return "not tuned"
        found = f"{'best' if self.tuned else 'at an end'} of {len(self.trials)}"
        return f"{found} short runs" if self.tuned_short else found

    @property
    def diverged(self) -> bool:
        """Whether a seed did not converge, the paper's ⋆."""
        return any(run.status == "diverged" for run in self.runs)

    def ours(self, which: Which = "last") -> Score | None:
        """Our number, in per cent; None where nothing has ended, a seed diverged, or it was not measured."""
        test, measure = MEASURES[which]
        tests = [summary[test] or {} for run in self.runs if (summary := run.summary)]
        values = [100 * found[measure] for found in tests if found.get(measure) is not None]
        if not values or len(values) < len(self.runs) or self.diverged:
            return None
        return Score(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, where both have a number."""
        ours = self.ours()
        return None if ours is None or self.cell.score is None else ours.mean - self.cell.score.mean


Ended = Mapping[str, Sequence[Run]]
"""The runs of a store that have ended, by their setting."""


def ended(root: Path) -> Ended:
    """What the store under `root` has, read once for several tables."""
    found: dict[str, list[Run]] = {}
    for run in find(root):
        if run.summary is not None:
            found.setdefault(setting(run.experiment), []).append(run)
    return found


def setting(experiment: Experiment) -> str:
    """The same for experiments that differ in nothing but seed and learning rate, however they are spelled.

    Where data are alike α does not matter, nor does the graph where everybody has the same model.
    """
    if experiment.partition == "iid":
        experiment = replace(experiment, alpha=1.0)
    if isinstance(algorithm(experiment.algorithm), Centralized):
        experiment = replace(experiment, topology=f"complete:{parse(experiment.topology).n}")
    return replace(experiment, seed=0, lr=None).hash


def outcomes(table: Table, store: Path | Ended, scale: Scale = "paper", short: bool = True) -> list[Outcome]:
    """What the store, a folder of runs, has of each cell of a table.

    `short`: whether a rate from short runs counts where too few were tried at the paper's scale.
    """
    runs = ended(store) if isinstance(store, Path) else store
    found = [_outcome(cell, scale, runs) for cell in table.cells]
    return [_or_at_short_rate(one, runs) for one in found] if short and scale == "paper" else found


def reproduce(
    table: Table,
    scale: Scale = "paper",
    seeds: int = 3,
    cells: Sequence[str] = (),
    options: Options | None = None,
    watch: Watcher = lambda runs, records: None,
    tune_short: bool = False,
) -> list[Outcome]:
    """Run what the store lacks of a table, or of the cells that the patterns name, and read its outcomes.

    Learning rates are tuned on seed 0; then all seeds run at the best. A rate that the store already has as tuned
    is taken as it is; one from short runs with `tune_short` alone, which tunes on those. Where data is missing cells
    stay as the store has them; it is an error if it has none.
    """
    if tune_short and scale != "paper":
        raise InputError(f"--tune-short is for the paper's scale; with --scale {scale} leave it out")
    options = replace(options or Options(), seeds=seeds)
    chosen = select(table, cells)
    part = replace(table, cells=tuple(chosen))
    lost = missing_data(chosen, scale, options.data_dir)

    def wanted(store: Ended, scale: Scale) -> list[Outcome]:
        return [one for one in outcomes(part, store, scale, short=False) if one.experiment.data not in lost]

    tried: Scale = "short" if tune_short else scale
    store = ended(options.runs)
    settled = [one.cell.name for one in wanted(store, scale) if one.fixed or one.tuned] if tune_short else []
    untuned = [one for one in wanted(store, tried) if one.cell.name not in settled]
    for rates, experiments in _grids(untuned, tried).items():
        tune(experiments, {"lr": rates}, replace(options, seeds=1), FEWEST_RATES if scale == "smoke" else CAP, watch)
    store = ended(options.runs)
    rated = wanted(store, scale)
    if tune_short:
        rated = [one if one.cell.name in settled else _chosen_short(one.cell, store) or one for one in rated]
    lacking = [experiment for one in rated for experiment in _seeds_to_run(one, seeds)]
    sweep(list(dict.fromkeys(lacking)), replace(options, seeds=1), watch)
    found = outcomes(part, options.runs, scale)
    if lost and not any(one.runs for one in found):
        raise InputError("; ".join(lost.values()))
    return found


def select(table: Table, patterns: Sequence[str]) -> list[Cell]:
    """The cells whose name, or whose experiment's name, fits one of the patterns; all without patterns.

    The experiment is the paper's with seed 0; a run's folder is named so but for the hash, which the learning rate and
    the scale change.

    >>> from quasiglobal.paper.tables import TABLES
    >>> [cell.name for cell in select(TABLES["motivation"], ["qg-*ring 16*0.1", "*-dsgd-social-a10-*"])]
    ['DSGD | social 32, α = 10', 'QG-DSGDm-N | ring 16, α = 0.1']
    """
    def fits(cell: Cell, pattern: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for name in (cell.name, cell.experiment.name))

    for pattern in patterns:
        if not any(fits(cell, pattern) for cell in table.cells):
            without_hash = table.cells[0].experiment.name.rpartition("-")[0]
            raise InputError(
                f"no cell of {table.name} is named as {pattern!r}; "
                f"names are as {table.cells[0].name!r} or {without_hash + '-*'!r}, * stands for anything"
            )
    return [cell for cell in table.cells if not patterns or any(fits(cell, pattern) for pattern in patterns)]


def missing_data(cells: Iterable[Cell], scale: Scale, data_dir: Path | None) -> dict[str, str]:
    """The data sets that the cells need and this machine has not, each with a sentence on how to get it.

    What lies nowhere on the disk is asked of the hub, as training would.
    """
    lost = {}
    for name in absent(data_names(cells, scale), data_dir):
        try:
            raw(name, data_dir)
        except InputError as error:
            lost[name] = str(error)
    return lost


def data_names(cells: Iterable[Cell], scale: Scale) -> list[str]:
    """The data sets that the cells need."""
    return list(dict.fromkeys(at_scale(cell.experiment, scale).data for cell in cells))


def absent(names: Iterable[str], data_dir: Path | None) -> list[str]:
    """Those of the data sets that the disk has not."""
    here = {found.name for found in available(data_dir) if found.where is not None and not found.missing}
    return [name for name in names if name not in here]


def _grids(found: Iterable[Outcome], scale: Scale) -> dict[tuple[float, ...], list[Experiment]]:
    """What is still to be tuned, by the learning rates to start from: what the store has tried is among them."""
    grids: dict[tuple[float, ...], dict[Experiment, None]] = {}
    for one in found:
        if not one.fixed and (not one.tuned or one.cell.algorithms):
            for experiment in one.cell.experiments(scale):
                start = one.cell.rates or rates_around(experiment.peak_lr)
                rates = tuple(sorted({*start, *one.trials}))
                grids.setdefault(rates, {})[experiment] = None
    return {rates: list(experiments) for rates, experiments in grids.items()}


def _seeds_to_run(one: Outcome, seeds: int) -> list[Experiment]:
    """A cell's experiment with each seed that the store lacks; none where no learning rate has been chosen yet."""
    if not one.fixed and not one.trials:
        return []
    first, have = one.experiment.seed, {run.experiment.seed for run in one.runs}
    return [one.experiment.with_seed(seed) for seed in range(first, first + seeds) if seed not in have]


def _outcome(cell: Cell, scale: Scale, store: Ended) -> Outcome:
    """The best of the cell's algorithms."""
    found = [_tried(cell, experiment, store.get(setting(experiment), ())) for experiment in cell.experiments(scale)]
    return max(found, key=lambda one: max(map(score, one.trials.values()), default=float("-inf")))


def _or_at_short_rate(one: Outcome, store: Ended) -> Outcome:
    """The cell at the rate from short runs, if it was run at it and too few were tried at the paper's scale."""
    if one.fixed or len(one.trials) >= FEWEST_RATES:
        return one
    short = _chosen_short(one.cell, store)
    return short if short and short.runs else one


def _chosen_short(cell: Cell, store: Ended) -> Outcome | None:
    """The cell at the paper's scale and the rate that is best at the short one; None where too few were tried."""
    short = _outcome(cell, "short", store)
    if len(short.trials) < FEWEST_RATES:
        return None
    alike = (one for one in cell.experiments("paper") if one.algorithm == short.experiment.algorithm)
    chosen = replace(next(alike), lr=short.experiment.peak_lr)
    found = _tried(cell, chosen, store.get(setting(chosen), ()))
    return replace(found, trials=short.trials, tuned_short=True)


def _tried(cell: Cell, experiment: Experiment, runs: Sequence[Run]) -> Outcome:
    if experiment.lr is not None:
        runs = [run for run in runs if run.experiment.peak_lr == experiment.lr]
    trials = {run.experiment.peak_lr: run for run in runs if run.experiment.seed == experiment.seed}
    if not trials:
        return Outcome(cell, experiment, (), {})
    (best,) = best_point({(rate,): score(run) for rate, run in trials.items()})
    seeds = {run.experiment.seed: run for run in runs if run.experiment.peak_lr == best}
    chosen = tuple(seeds[seed] for seed in sorted(seeds))
    return Outcome(cell, replace(experiment, lr=best), chosen, dict(sorted(trials.items())))
