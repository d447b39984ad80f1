"""Tables that `qg reproduce` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from quasiglobal.cli.terminal import WIDE, console, time_in_words
from quasiglobal.paper.cells import PaperTable, Scale
from quasiglobal.paper.outcomes import Outcome
from quasiglobal.paper.published import NOT_CONVERGED
from quasiglobal.paper.reproduce import absent
from quasiglobal.paper.targets import TARGETS, cost, recorded, stand
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import RunStore


def targets_table(names: Sequence[str], scale: Scale, options: Options, tune_short: bool) -> Table:
    """Every target with its cells, the finished and missing runs, and the estimated time of the missing runs."""
    store, device = RunStore.read(options.runs), choose_device(options.device)
    speeds = recorded(store, device)
    missing = Column("data missing", overflow="fold")
    table = Table(Column("target", no_wrap=True), "cells", "tried", "done", "runs left", "about", missing)
    table.caption = (
        f"At {scale} scale with {options.seeds} seeds. Learning-rate grids may grow beyond the runs counted here; "
        f"times are estimated from stored runs of the same model on {device.type}, else from a few plain steps."
    )
    if console.width >= WIDE:
        table.add_column("shows")
    for name in names:
        target = TARGETS[name]
        shows = (target.title,) * (console.width >= WIDE)
        if target.table is None or not target.table.cells:
            lost = absent(target.data if scale != "smoke" else (), options.data_dir)
            table.add_row(name, "-", "-", "-", "-", "seconds", ", ".join(lost), *shows)
            continue
        at = stand(target.table, store, scale, options.seeds, options.data_dir, tune_short)
        with console.status(f"estimating {name}"):
            seconds, everything = cost(at.to_run, device, speeds)
        known = f"over {time_in_words(seconds)}" if seconds else "unknown"
        counts = (at.cells, at.tried, at.done, len(at.to_run))
        about = time_in_words(seconds) if everything else known
        table.add_row(name, *map(str, counts), about, ", ".join(at.missing), *shows)
    return table


def beside_the_paper(table: PaperTable, found: Sequence[Outcome], scale: Scale) -> Table:
    """One row per cell: the paper's number, ours, and how the learning rate was found."""
    further = ("best epoch", "averaged") if console.width >= WIDE else ()
    numbers = (Column(name, no_wrap=True) for name in ("paper", "ours", "ours −\npaper", "seeds"))
    names = (Column(name, overflow="fold") for name in ("row", "column"))
    rate = Column("lr", overflow="fold")
    shown = Table(*names, *numbers, rate, *(Column(name, no_wrap=True) for name in further))
    shown.title = table.title_at(scale)
    for one in found:
        difference = one.difference if scale != "smoke" else None
        nothing = NOT_CONVERGED if one.diverged else "-"
        last, *others = (str(score or nothing) for score in (one.ours(), one.ours("best"), one.ours("averaged")))
        shown.add_row(
            str(one.cell.row), str(one.cell.column), str(one.cell.score or NOT_CONVERGED), last,
            "-" if difference is None else f"{difference:+.2f}", str(len(one.runs)),
            f"{one.experiment.peak_lr:g}, {one.how}" if one.runs else one.how, *(others if further else ()),
        )
    return shown
