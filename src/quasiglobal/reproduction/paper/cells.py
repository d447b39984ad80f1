"""Cells of the paper's tables and figures: the published number and the experiment that reproduces it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from quasiglobal.errors import unknown
from quasiglobal.reproduction.paper.published import CellLabel, ColumnLabel, RowLabel
from quasiglobal.runs.comparison import Score
from quasiglobal.training.experiment import Experiment

Scale = Literal["smoke", "short", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class PaperCell:
    """A published number and the experiment that reproduces it."""

    row: RowLabel
    column: ColumnLabel
    experiment: Experiment
    """The experiment at the paper's scale with seed 0; `lr` is None if it is tuned."""
    score: Score | None
    """The paper's number; None if the run did not converge or the paper reports none."""
    text: bool = False
    """Whether the cell follows the paper's text where the released code, which made the number, differs."""
    rates: tuple[float, ...] = ()
    """Initial grid of learning rates; default: around the learning rate scaled with the global batch size."""
    algorithms: tuple[str, ...] = ()
    """Variants of the algorithm that are tuned together with the learning rate; the best counts."""

    def experiments(self, scale: Scale = "paper") -> tuple[Experiment, ...]:
        """The experiments to tune, one per variant of the algorithm."""
        first = at_scale(self.experiment, scale)
        return (first, *(replace(first, algorithm=other) for other in self.algorithms))

    @property
    def label(self) -> CellLabel:
        """Row and column label."""
        return self.row, self.column

    @property
    def name(self) -> str:
        """Row and column as text, as matched by `--cells`."""
        return f"{self.row} | {self.column}"


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, cell by cell."""

    name: str
    title: str
    cells: tuple[PaperCell, ...]
    notes: tuple[str, ...] = ()

    def title_at(self, scale: Scale) -> str:
        """The title, with the changes to the paper's experiments at this scale.

        >>> PaperTable("single-worker", "A single worker", ()).title_at("short")
        'A single worker (SHORT: a tenth of the epochs)'
        """
        return f"{self.title} ({scale.upper()}: {DIFFERENCE[scale]})" if scale in DIFFERENCE else self.title


DIFFERENCE = {
    "short": "a tenth of the epochs",
    "smoke": "digits in place of the data, a small network in place of the model, a quarter of the nodes, two epochs",
}
"""Changes to the paper's experiments at each scale, as text."""

SMOKE_TOPOLOGIES = {
    "ring:16": "ring:4", "ring:32": "ring:8", "ring:48": "ring:12", "social": "torus:9",
    "complete:1": "complete:1", "complete:16": "complete:4", "complete:32": "complete:8", "complete:48": "complete:12",
    "one-peer-exponential:16": "one-peer-exponential:4",
}
"""Replacements of the paper's topologies, with about a quarter of the nodes."""


@cache
def at_scale(experiment: Experiment, scale: Scale) -> Experiment:
    """Scale an experiment down: smoke is a quick check on a CPU, short has a tenth of the paper's epochs.

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
