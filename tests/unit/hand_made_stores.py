"""Run folders as training would leave them, with scores that a test chooses."""

from dataclasses import replace

from quasiglobal.paper.tables import TABLES, at_scale
from quasiglobal.runs import Run


def cell(table, row, column):
    """A cell of a table by name."""
    return next(cell for cell in TABLES[table].cells if (cell.row, cell.column) == (row, column))


def leave(root, cell, accuracies, lr=0.8, averaged=0.01, diverged=(), scale="paper"):
    """The runs of a cell, with these accuracies in per cent for seeds 0, 1, …; a seed among `diverged` did."""
    for seed, accuracy in enumerate(accuracies):
        experiment = replace(at_scale(cell.experiment, scale), lr=lr, seed=seed)
        run = Run.of(experiment, root)
        run.begin(None)
        for epoch in range(1, experiment.epochs + 1):
            if epoch % experiment.eval_every == 0:
                share = accuracy / 100 * (1 - 0.6 * 2 ** (-8 * epoch / experiment.epochs))
                run.write({"epoch": epoch, "loss": 1.0, "accuracy": share, "accuracy_averaged": share + averaged})
        last = {"epoch": experiment.epochs, "loss": 0.1, "accuracy": accuracy / 100}
        run.write(last | {"accuracy_averaged": accuracy / 100 + averaged})
        run.finish("diverged" if seed in diverged else "finished", {})


def leave_table(root, name, off=0.0, seeds=3, skip=()):
    """Every cell of a table at about the paper's numbers, tuned on three rates."""
    for cell in TABLES[name].cells:
        if cell.score is None or cell.row in skip:
            continue
        spread = cell.score.std or 0.5
        around = [cell.score.mean + off + spread * (seed - (seeds - 1) / 2) for seed in range(seeds)]
        leave(root, cell, around, lr=0.8)
        leave(root, cell, [around[0] - 3], lr=0.4)
        leave(root, cell, [around[0] - 5], lr=1.6)
