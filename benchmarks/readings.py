"""Compare three readings of the released ResNet-EvoNorm-20 with the paper's rows, on the same trained weights.

    python benchmarks/readings.py docs/results/runs --runs runs --data-dir data      # train what is missing, on a GPU
    python benchmarks/readings.py docs/results/runs --runs runs --show               # the table of what was trained
    python benchmarks/readings.py … --draws shared                     # all nodes draw from one generator, as released
    python benchmarks/readings.py … --every-epoch '*-qg-dsgdm-n-ring16-a0.1-s[01]-*'   # test two runs in every epoch
    python benchmarks/readings.py docs/results/runs --partitions --data-dir data     # are the partitions typical?

The first folder has the runs of `evonorm-released`, whose tuned learning rates are used. With --tiny, a small run on
digits is trained, and the tables are those of the first folder.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import numpy as np

from quasiglobal.common.files import markdown_table
from quasiglobal.data import load, split
from quasiglobal.data.partition import class_counts
from quasiglobal.errors import InputError
from quasiglobal.reproduction.paper.outcomes import PAPER_SEEDS, outcomes
from quasiglobal.reproduction.paper.readings import READINGS, TRAINED, ScoreReadings, last_and_best, read_readings
from quasiglobal.reproduction.paper.tables import TABLES, PaperCell
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunStore
from quasiglobal.topology.parsing import parse
from quasiglobal.training.experiment import Experiment, setting

Generator = Literal["own", "shared"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tuned", type=Path, nargs="?", default=Path(__file__).parents[1] / "docs" / "results" / "runs")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--every-epoch", nargs="+", default=[], metavar="GLOB",
        help="also test the runs with these names in every epoch, to measure what more tests add to the best",
    )
    parser.add_argument("--draws", choices=["own", "shared"], default="own", help="each node's own generator, or one")
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="GLOB", help="train only the runs with these names"
    )
    parser.add_argument("--partitions", action="store_true", help="only compare the partitions of 300 seeds")
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    chosen = parser.parse_args()
    if chosen.partitions or chosen.tiny:
        print(partitions("digits", None, seeds=4) if chosen.tiny else partitions("cifar10", chosen.data_dir))
    if chosen.partitions:
        return
    if not chosen.show:
        options = Options(runs=chosen.runs, data_dir=chosen.data_dir, seeds=1)
        scores = ScoreReadings(["*"] if chosen.tiny else chosen.every_epoch)
        every = experiments(RunStore.read(chosen.tuned), chosen.seeds, chosen.draws)
        wanted = [one for one in every if any(fnmatch(one.name, pattern) for pattern in chosen.cells)]
        wanted = [replace(every[0], **TINY)] if chosen.tiny else wanted
        simulate(wanted, options, callbacks=[scores])
    store = RunStore.read(chosen.tuned if chosen.tiny else chosen.runs)
    print("Mean of the nodes\n", table(store, draws=chosen.draws), sep="\n")
    print("Averaged model\n", table(store, averaged=True, draws=chosen.draws), sep="\n")
    print(table_of_more_tests(RunStore.read(chosen.runs)))


TINY = {
    "data": "digits", "model": "resnet8", "width": 0.25, "topology": "ring:3", "batch": 4, "steps": 1, "epochs": 2,
    "eval_every": 2, "precision": "fp32", "warmup": 0.0,
}


def partitions(data: str, data_dir: Path | None, seeds: int = 300) -> str:
    """How much the nodes' classes differ, for the seeds 0, 1, 2 and many others, as Markdown.

    The distance of a node's distribution of classes to that of all data, and of the mean over a node and its two
    neighbours; half of the sum of absolute differences, a mean over the nodes.
    """
    labels = np.asarray(load(data, data_dir).train.y)
    mixing = parse("ring:16").matrices[0]
    rows = []
    for alpha in (1.0, 0.1):
        found = []
        for seed in range(seeds):
            counts = class_counts(split(labels, 16, kind="dirichlet", alpha=alpha, seed=seed), labels, 10)
            shares = counts / counts.sum(axis=1, keepdims=True)
            found.append([np.abs(one - shares.mean(0)).sum(1).mean() / 2 for one in (shares, mixing @ shares)])
        for values, name in zip(np.array(found).T, ("node", "node and neighbours"), strict=True):
            smaller = [f"{one:.2f} ({(values < one).mean():.0%})" for one in values[:3]]
            rows.append([f"{alpha:g}", name, *smaller, f"{values.mean():.2f} ± {values.std():.2f}"])
    header = ["α", "distance", "seed 0 (seeds with less)", "seed 1", "seed 2", f"{seeds} seeds"]
    return markdown_table(header, rows)


def experiments(store: RunStore, seeds: int = 3, draws: Generator = "own") -> list[Experiment]:
    """The runs that compare the readings: the rows of ResNet-EvoNorm-20 on a ring of 16, at their tuned rates.

    With `draws = "shared"` all nodes draw from one generator, as in the released code.

    Training is that of `evonorm-released`, so the rates of its cells in the store hold; a cell without runs takes the
    rate of the same method's other cells.
    """
    found = [one for one in outcomes(TABLES["cifar10"], store) if _compares(one.cell)]
    rates: dict[str, float] = {}
    for one in found:
        if one.runs:
            rates.setdefault(one.cell.row.method, one.experiment.peak_lr)
    chosen = []
    for one in found:
        rate = one.experiment.peak_lr if one.runs else rates.get(one.cell.row.method, one.experiment.peak_lr)
        chosen += [replace(_experiment(one.cell, draws), lr=rate, seed=seed) for seed in range(seeds)]
    return chosen


def table(store: RunStore, averaged: bool = False, draws: Generator = "own") -> str:
    """Each cell beside the paper's in all readings, last and best, as Markdown; with `averaged`, of the averaged model.

    The last rows have, for each reading, the sum of the squared deviations in units of the noise, the standard error
    of the difference of two means over seeds: for each method, and for all of them.
    """
    suffix = "_averaged" if averaged else ""
    keys = [(name, which) for name in READINGS for which in WHICH]
    rows: list[list[str]] = []
    sums: dict[str, dict[tuple[str, str], float]] = {}
    for cell in filter(_compares, TABLES["cifar10"].cells):
        runs = [run for run in store.ended.get(setting(_experiment(cell, draws)), ()) if read_readings(run)]
        if not runs or cell.score is None:
            continue
        cells = []
        for name, which in keys:
            values = [100 * last_and_best(read_readings(run), name + suffix)[WHICH.index(which)] for run in runs]
            ours = Score.of(values)
            cells.append(f"{ours} ({len(values)})")
            for summed in (cell.row.method, "all"):
                of = sums.setdefault(summed, dict.fromkeys(keys, 0.0))
                of[name, which] += _deviation(ours, len(values), cell.score) ** 2
        rows.append([cell.row.method, cell.column.setting, str(cell.score), *cells])
    if not rows:
        raise InputError(f"{store.root} has no runs with readings; train those of `experiments` with ScoreReadings")
    everything = sums.pop("all")
    for method, of in [*sums.items(), ("all methods", everything)]:
        rows.append([f"squared deviations, {method}", "", "", *(f"{value:.1f}" for value in of.values())])
    return markdown_table(["method", "setting", "paper", *(f"{name}, {which}" for name, which in keys)], rows)


def table_of_more_tests(store: RunStore) -> str:
    """What a test in every epoch adds to the best, for the runs that have one: in all readings, as Markdown."""
    rows = []
    for run in (run for runs in store.ended.values() for run in runs):
        usual, all_tests = read_readings(run), read_readings(run, every_epoch=True)
        if not usual or len(all_tests) == len(usual):
            continue
        for name in READINGS:
            last, best = last_and_best(usual, name)
            more = last_and_best(all_tests, name)[1]
            numbers = [f"{100 * value:.2f}" for value in (last, best, more, more - best)]
            rows.append([run.folder.name, name, f"{len(usual)}, {len(all_tests)}", *numbers])
    header = ["run", "reading", "tests", "last", "best", "best of all epochs", "difference"]
    return markdown_table(header, rows) if rows else ""


WHICH = ("last", "best")


def _compares(cell: PaperCell) -> bool:
    return cell.row.model == "ResNet-EvoNorm-20" and cell.column.group == "ring 16"


def _experiment(cell: PaperCell, draws: Generator) -> Experiment:
    return replace(cell.experiment, norm=READINGS[TRAINED], draws=draws)


def _deviation(ours: Score, seeds: int, papers: Score) -> float:
    """Difference of the means in units of its standard error; a single seed borrows the paper's deviation."""
    own, other = (ours.std if ours.std is not None else papers.std or 0.0), papers.std or 0.0
    return (ours.mean - papers.mean) / math.sqrt(own**2 / seeds + other**2 / PAPER_SEEDS)


if __name__ == "__main__":
    main()
