"""Cells of the paper's tables and figures: a number, and the experiment that should give it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from quasiglobal.errors import unknown
from quasiglobal.paper.published import CellLabel, ColumnLabel, RowLabel, Score
from quasiglobal.training.experiment import Experiment

Scale = Literal["smoke", "short", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class PaperCell:
    """A number of a table, and the experiment that should give it."""

    row: RowLabel
    column: ColumnLabel
    experiment: Experiment
    """At the paper's scale, seed 0; without a learning rate where that is tuned."""
    score: Score | None
    """The paper's number; None where it did not converge, or where the paper has none."""
    text: bool = False
    """Whether this is the form of the paper's text where another made the number."""
    rates: tuple[float, ...] = ()
    """Where to start the tuning; by default around the learning rate that grows with the batch."""
    algorithms: tuple[str, ...] = ()
    """Other options of the algorithm that are tuned with the learning rate; the best counts."""

    def experiments(self, scale: Scale = "paper") -> tuple[Experiment, ...]:
        """What is tuned: the experiment, with each of its algorithms."""
        first = at_scale(self.experiment, scale)
        return (first, *(replace(first, algorithm=other) for other in self.algorithms))

    @property
    def label(self) -> CellLabel:
        """Its place in the table."""
        return self.row, self.column

    @property
    def name(self) -> str:
        """How a reader finds it."""
        return f"{self.row} | {self.column}"


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, cell by cell."""

    name: str
    title: str
    cells: tuple[PaperCell, ...]
    notes: tuple[str, ...] = ()

    def title_at(self, scale: Scale) -> str:
        """The title, with what differs from the paper at this scale.

        >>> PaperTable("single-worker", "A single worker", ()).title_at("short")
        'A single worker (SHORT: a tenth of the epochs)'
        """
        return f"{self.title} ({scale.upper()}: {DIFFERENCE[scale]})" if scale in DIFFERENCE else self.title


DIFFERENCE = {
    "short": "a tenth of the epochs",
    "smoke": "digits in place of the data, a small network in place of the model, a quarter of the nodes, two epochs",
}
"""What a scale changes of the paper's experiments."""

SMOKE_TOPOLOGIES = {
    "ring:16": "ring:4", "ring:32": "ring:8", "ring:48": "ring:12", "social": "torus:9",
    "complete:1": "complete:1", "complete:16": "complete:4", "complete:32": "complete:8", "complete:48": "complete:12",
    "one-peer-exponential:16": "one-peer-exponential:4",
}
"""A quarter of the nodes of the paper's topologies."""


def at_scale(experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment at a scale: smoke shows on a CPU that all works, short has a tenth of the paper's epochs.

    >>> at_scale(Experiment(epochs=300, topology="ring:16"), "smoke").topology
    'ring:4'
    """
    if scale == "paper":
        return experiment
    if scale == "short":
        return replace(
            experiment, epochs=max(1, experiment.epochs // 10), warmup=experiment.warmup / 10,
            eval_every=max(1, experiment.eval_every // 2),
        )
    if scale != "smoke":
        raise unknown("scale", scale, SCALES)
    model, norm = ("mlp", None) if experiment.reads_texts else ("cnn", experiment.norm or "none")
    return replace(
        experiment, data="digits", model=model, norm=norm, width=0.5, precision="fp32",
        epochs=2, eval_every=2, warmup=0.0, batch=32, topology=SMOKE_TOPOLOGIES[experiment.topology],
    )
