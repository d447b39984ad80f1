"""Run folders as training writes them, with scores chosen by a test."""

from dataclasses import replace

from quasiglobal.reproduction.paper.tables import TABLES, ColumnLabel, RowLabel, at_scale
from quasiglobal.runs.store import RunFolder


def cell(table, row, column):
    """Find a table's cell by row and column name."""
    place = RowLabel.parse(row), ColumnLabel.parse(column)
    return next(cell for cell in TABLES[table].cells if cell.label == place)


def leave(root, cell, accuracies, lr=0.8, averaged=0.01, diverged=(), scale="paper"):
    """Write runs of a cell with these accuracies in per cent for seeds 0, 1, …; `diverged` lists diverged seeds."""
    for seed, accuracy in enumerate(accuracies):
        experiment = replace(at_scale(cell.experiment, scale), lr=lr, seed=seed)
        run = RunFolder.of(experiment, root)
        run.begin(None)
        for epoch in range(experiment.eval_every, experiment.epochs, experiment.eval_every):
            run.write(_record(epoch, accuracy * (1 - 0.6 * 2 ** (-8 * epoch / experiment.epochs)), averaged))
        run.write(_record(experiment.epochs, accuracy, averaged))
        run.finish("diverged" if seed in diverged else "finished", {})


def leave_table(root, name, off=0.0, seeds=3, skip=()):
    """Write runs near the paper's numbers for every cell of a table, tuned on three learning rates."""
    for cell in TABLES[name].cells:
        if cell.score is None or cell.row in skip:
            continue
        spread = cell.score.std or 0.5
        around = [cell.score.mean + off + spread * (seed - (seeds - 1) / 2) for seed in range(seeds)]
        leave(root, cell, around, lr=0.8)
        leave(root, cell, [around[0] - 3], lr=0.4)
        leave(root, cell, [around[0] - 5], lr=1.6)


def _record(epoch, accuracy, averaged):
    share = accuracy / 100
    return {
        "epoch": epoch, "loss": 1 - share, "train_accuracy": share, "test_loss": 1 - share, "accuracy": share,
        "accuracy_worst": share, "accuracy_averaged": share + averaged, "weight_norm": 40.0, "effective_step": 5e-4,
    }  # fmt: skip
