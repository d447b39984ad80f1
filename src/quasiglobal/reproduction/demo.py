"""`qg demo`: the paper's main result in a few minutes, on embedded data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quasiglobal.cli.arguments import Folder, Json, call
from quasiglobal.cli.terminal import Listing, console, print_json, progress_bar, say_written
from quasiglobal.common.files import write_csv
from quasiglobal.runs import plots
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.plots import COLOURS, draw_curve, panels, style
from quasiglobal.runs.store import Run
from quasiglobal.runs.tuning import best_point, score
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import AVERAGED, BEST, SCORE, WORST, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def demo(out: Folder = Path("out"), json: Json = False) -> None:
    """Compare no, local and quasi-global momentum on heterogeneous data, and centralized training.

    Trains 16 small convolutional networks on a ring to recognise digits. Takes three to four minutes on two cores.

    Args:
        out: The folder for demo.png, demo.svg, demo.csv and the runs.
    """
    setting = DemoSetting()
    alphas = " and ".join(f"{alpha:g}" for alpha in setting.alphas)
    console.print(
        "16 nodes on a ring, each with only a few kinds of digits, learn to read all ten "
        f"(Dirichlet α = {alphas}).\nImages stay at their node; neighbours average their models after each step.\n"
    )
    with progress_bar() as progress:
        task = progress.add_task("", total=setting.epochs)
        outcomes = compare(
            setting, out / "runs", advance=lambda name: progress.update(task, advance=1, description=name)
        )
    rows = numbers(outcomes)
    if json:
        print_json([{f"{key}{PERCENT.get(key, '')}": value for key, value in row.items()} for row in rows])
    else:
        Listing(rows, {
            "algorithm": "algorithm",
            "data": "data",
            "tuned lr": lambda row: f"{row['lr']:g}",
            "test accuracy, %": lambda row: f"{row['accuracy']:.1f} ± {row['std']:.1f}",
            "best test": lambda row: f"{row['best']:.1f}",
            "worst node": lambda row: f"{row['worst_node']:.1f}",
            "averaged model": lambda row: f"{row['averaged_model']:.1f}",
        }).show()
    by_name = {row["algorithm"]: row for row in rows}               # keeps the last row, of the smallest α
    local, quasi = by_name["dsgdm-n"], by_name["qg-dsgdm-n"]
    console.print(
        f"At {local['data']}, local momentum (dsgdm-n) reaches {local['accuracy']:.1f}%, quasi-global momentum "
        f"(qg-dsgdm-n) {quasi['accuracy']:.1f}%, with the same traffic.\nAccuracy is the mean over the nodes' "
        f"models after the last epoch, ± std over {setting.seeds} seeds; best is that of the best test; learning rates "
        "are tuned on another seed; sgdm-n is centralized."
    )
    written = plots.save(draw(setting, outcomes), out, "demo")
    write_csv(out / "demo.csv", rows)
    say_written([*written, out / "demo.csv", out / "runs"])


PERCENT = dict.fromkeys(("accuracy", "std", "best", "worst_node", "averaged_model"), "_percent")
"""Unit of the numbers in per cent, part of their names in JSON."""


def run(name: str, words: Sequence[str]) -> None:
    """Run this command."""
    call({"demo": demo}, name, words)


CENTRALIZED = "sgdm-n"
"""The reference: iid data and an exact mean at each step."""

BASE = Experiment(data="digits", model="cnn", topology="ring:16", epochs=30, eval_every=3)


@dataclass(frozen=True)
class DemoSetting:
    """Algorithms, degrees of heterogeneity, learning rates and seeds to compare."""

    algorithms: tuple[str, ...] = ("dsgd", "dsgdm-n", "qg-dsgdm-n")
    alphas: tuple[float, ...] = (0.1, 0.01)
    rates: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2, 0.4)
    seeds: int = 3
    base: Experiment = BASE

    @property
    def cells(self) -> list[Experiment]:
        """Each algorithm on each α, the reference first."""
        reference = replace(self.base, algorithm=CENTRALIZED, partition="iid", alpha=self.alphas[0])
        return [reference] + [
            replace(self.base, algorithm=name, alpha=alpha) for alpha in self.alphas for name in self.algorithms
        ]

    @property
    def epochs(self) -> int:
        """Number of calls of `advance` if no run exists yet."""
        return len(self.cells) * (len(self.rates) + 1) * self.base.epochs


@dataclass(frozen=True)
class DemoOutcome:
    """A cell with its tuned learning rate, and its runs."""

    experiment: Experiment
    runs: list[Run]

    @property
    def data(self) -> str:
        """Label of the partition."""
        return "iid" if self.experiment.partition == "iid" else f"α = {self.experiment.alpha:g}"


def compare(setting: DemoSetting, root: Path, advance: Callable[[str], None] = lambda label: None) -> list[DemoOutcome]:
    """Tune and run every cell, with run folders under `root`; finished runs are reused."""
    return [_tuned(cell, setting, root, advance) for cell in setting.cells]


def _tuned(cell: Experiment, setting: DemoSetting, root: Path, advance: Callable[[str], None]) -> DemoOutcome:
    def run(rate: float, seed: int, seeds: int) -> list[Run]:
        experiment = replace(cell, lr=rate, seed=seed)
        return simulate(experiment, Options(seeds=seeds, runs=root), lambda runs, records: advance(cell.algorithm))

    (best,) = best_point({(rate,): score(*run(rate, 0, 1)) for rate in setting.rates})
    return DemoOutcome(replace(cell, lr=best), run(best, 1, setting.seeds))


def _reached(run: Run, metric: str = SCORE, best: bool = False) -> float:
    """A metric in the last test, or in the best one; 0 if it was not measured."""
    if run.summary is None:
        return 0.0
    return number(run.summary.best if best else run.summary.last, metric) or 0.0


def draw(setting: DemoSetting, outcomes: Sequence[DemoOutcome]) -> Figure:
    """Plot accuracy over the epochs, one panel per α: mean of the nodes, band from the worst to the best node."""
    with style():
        figure, axes = panels(1, len(setting.alphas), 4.6, 3.2)
        for panel, alpha in zip(axes, setting.alphas, strict=True):
            for outcome in outcomes:
                name = outcome.experiment.algorithm
                if name == CENTRALIZED or outcome.experiment.alpha == alpha:
                    draw_curve(
                        panel, [run.records() for run in outcome.runs], SCORE, factor=100, colour=COLOURS[name],
                        label=f"{name} (centralized)" if name == CENTRALIZED else name,
                        band=(WORST, BEST),
                    )
            panel.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100))
            panel.set_title(f"α = {alpha:g}: mean of the nodes; band: worst to best node")
        axes[0].legend(loc="lower right")
    return figure


def numbers(outcomes: Sequence[DemoOutcome]) -> list[dict[str, object]]:
    """One row per cell; accuracies in per cent."""
    return [
        {
            "algorithm": outcome.experiment.algorithm,
            "data": outcome.data,
            "lr": outcome.experiment.lr,
            "accuracy": 100 * statistics.mean(accuracies),
            "std": 100 * statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "best": 100 * statistics.mean(_reached(run, best=True) for run in outcome.runs),
            "worst_node": 100 * min(_reached(run, WORST) for run in outcome.runs),
            "averaged_model": 100 * statistics.mean(_reached(run, AVERAGED) for run in outcome.runs),
            "consensus_distance": statistics.mean(_reached(run, "consensus_distance") for run in outcome.runs),
        }
        for outcome in outcomes
        for accuracies in [[_reached(run) for run in outcome.runs]]
    ]
