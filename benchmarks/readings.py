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
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from quasiglobal.common.files import markdown_table
from quasiglobal.data import load, split
from quasiglobal.data.partition import class_counts
from quasiglobal.reproduction.paper.readings import ScoreReadings, experiments, table, table_of_more_tests
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunStore
from quasiglobal.topology.parsing import parse


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


if __name__ == "__main__":
    main()
