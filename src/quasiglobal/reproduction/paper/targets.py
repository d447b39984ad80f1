"""Targets of `qg reproduce` by name: the paper's tables, and its figures with and without training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from quasiglobal.data.sources import SOURCES
from quasiglobal.reproduction.paper.cells import PaperTable, Scale
from quasiglobal.reproduction.paper.figures.partitions import PARTITIONS
from quasiglobal.reproduction.paper.figures.toy import FIGURES
from quasiglobal.reproduction.paper.figures.training import TRAINED
from quasiglobal.reproduction.paper.outcomes import FEWEST_RATES, Outcome, outcomes
from quasiglobal.reproduction.paper.reproduce import absent, data_names
from quasiglobal.reproduction.paper.tables import TABLES
from quasiglobal.runs.estimate import images_per_second
from quasiglobal.runs.store import RunStore
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
        """A form of the title, after the paper's number.

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


NUMBERS = {
    "motivation": "Figure 1", "cifar10": "Table 1", "gradient-tracking": "Table 2", "imagenet": "Table 3",
    "imagenet-topologies": "Table 4", "momentum-variants": "Table 5", "adam": "Table 6", "single-worker": "Figure 12",
    "weight-decay": "Figure 13", "ring-scales": "Table 7", "multi-step": "Table 8",
    "figure-motivation": "Figure 1", "figure-2d": "Figures 2 and 11", "figure-consensus": "Figures 3 and 10",
    "figure-rosenbrock": "Figures 4 and 15", "figure-effective-step": "Figures 5 and 14",
    "figure-ring-scales": "Figure 6", "figure-topology": "Figure 7", "figure-partition": "Figures 8 and 9",
    "figure-single-worker": "Figure 12", "figure-weight-decay": "Figure 13", "figure-nonconvex": "Figure 16",
    "figure-curves": "Figure 17", "figure-momentum-tuning": "Figure 18",
}
"""The paper's numbers of the tables and figures, including those of the appendix."""

TARGETS: dict[str, Target] = {
    **{name: Target(name, table.title, table) for name, table in TABLES.items()},
    **{name: Target(name, figure.table.title, figure.table, drawn=True) for name, figure in TRAINED.items()},
    **{name: Target(name, (make.__doc__ or "").splitlines()[0], drawn=True) for name, make in FIGURES.items()},
}
TARGETS["figure-partition"] = replace(
    TARGETS["figure-partition"], data=tuple(dict.fromkeys(data for _, data, *_ in PARTITIONS))
)
"""All targets of `qg reproduce` by name."""


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
    trials = 0 if one.fixed or one.tuned else max(0, FEWEST_RATES * len(one.cell.experiments(scale)) - len(one.trials))
    ended = len(one.runs) if one.runs else min(1, trials)               # the best trial counts as one seed
    return [one.experiment] * (trials + max(0, seeds - ended))
