"""Commands that show runs: runs, compare, plot, status."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Column, Table

from quasiglobal.cli.arguments import File, Folders, RunArgument, RunsFolder, call
from quasiglobal.cli.tables import columns, compared, comparison
from quasiglobal.cli.terminal import console, say_written, size_in_words, time_in_words
from quasiglobal.errors import InputError, unknown
from quasiglobal.report import plots
from quasiglobal.report.markdown import table as markdown_table
from quasiglobal.runs.parts import parts_of
from quasiglobal.runs.store import Run, RunStore, read_run
from quasiglobal.training.experiment import group_by_seed
from quasiglobal.training.metrics import Ranking, last_and_best, number


def runs(folder: RunsFolder = Path("runs")) -> None:
    """List the runs and their status.

    Args:
        folder: The folder of all runs.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; name the folder of your runs, or create runs with `qg train`")
    found = RunStore.read(folder).runs
    if not found:
        raise InputError(f"there are no runs in {folder}; name another folder, or create runs with `qg train`")
    (title, *others) = {run.score.title for run in found} or {"accuracy, %"}
    table = Table(Column("run", overflow="fold"), "status", "epochs", "score" if others else title, "best")
    for run in found:
        records, score = run.records(), run.score
        tested = last_and_best(records, run.experiment.metric)
        scores = [score.shown(number(test, score.name)) for test in tested]
        if others and scores[0]:
            scores[0] = f"{score.name} {scores[0]}{'%' if score.percent else ''}"
        table.add_row(run.folder.name, run.status, f"{len(records)}/{run.experiment.epochs}", *scores)
    console.print(table)


def compare(folders: Folders = (), markdown: bool = False) -> None:
    """Print a table of runs: mean ± std over the runs that differ only in their seed.

    Args:
        folders: Run folders; by default all in runs/.
        markdown: Print a Markdown table.
    """
    found = _runs_at(folders)
    if markdown:
        print(markdown_table(columns(found), compared(found)))
    else:
        console.print(comparison(found))


def plot(folders: Folders = (), out: File = Path("out/curves.png"), metric: str | None = None) -> None:
    """Draw the learning curves of runs.

    Args:
        folders: Run folders; by default all in runs/.
        out: The file to draw into (.png, .svg or .pdf).
        metric: Entry of the records to draw instead of the score, such as test_loss, accuracy_worst or accuracy_nodes.
    """
    groups = group_by_seed(_runs_at(folders), lambda run: run.experiment)
    curves = {label: [run.records() for run in group] for label, group in groups.items()}
    algorithms = [group[0].experiment.algorithm for group in groups.values()]
    scores = {_drawn(group[0], metric) for group in groups.values()}
    if len(scores) > 1:
        raise InputError(
            f"the runs have the scores {', '.join(sorted(one.name for one in scores))}; name a --metric"
        )
    plots.save_as(plots.draw_curves(curves, algorithms, scores.pop()), out)
    say_written([out])


def _drawn(run: Run, metric: str | None) -> Ranking:
    """The score of a run, or the named entry of its records."""
    if metric is None:
        return run.score
    entries = {name for record in run.records() for name in record}
    if metric not in entries:
        raise unknown("metric", metric, sorted(entries))
    return replace(run.score if metric.startswith(run.score.name) else Ranking(percent=False), name=metric)


def status(folder: RunArgument) -> None:
    """Show the progress, the traffic per edge and the lost edges of each process of a distributed run.

    Args:
        folder: A run folder.
    """
    parts = parts_of(read_run(folder).folder)
    if not parts:
        raise InputError(f"{folder} has no parts: it was not trained with --engine distributed or `qg node`")
    newest = [measured[-1] if (measured := part.read_measures()) else None for part in parts]
    furthest = max((last["step"] for last in newest if last), default=0)
    counted = ("process", "nodes", "epoch", "step", "behind", "loss")
    table = Table(*counted, "sent", "waited", "updated", "lost edges", "status")
    for part, last in zip(parts, newest, strict=True):
        nodes = f"{part.nodes[0]}-{part.nodes[-1]}" if len(part.nodes) > 1 else str(part.nodes[0])
        cells = ["-"] * 8
        if last:
            lost = ", ".join(f"{there}: {why}" for there, why in last["lost"].items()) or "none"
            cells = [
                str(last["epoch"]), str(last["step"]), str(furthest - last["step"]),
                f"{statistics.fmean(last['loss']):.3f}", *_carried(last["edges"]),
                f"{time_in_words(time.time() - last['written'])} ago", lost,
            ]
        table.add_row(str(part.process), nodes, *cells, part.read_status() or "training")
    console.print(table)


def _carried(edges: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """The bytes sent and the seconds waited, for each neighbouring process."""
    sent = ", ".join(f"{there}: {size_in_words(account['sent'])}" for there, account in edges.items())
    waited = ", ".join(f"{there}: {account['waited']:.1f} s" for there, account in edges.items())
    return sent, waited


def _runs_at(folders: Sequence[Path]) -> list[Run]:
    found = [read_run(folder) for folder in folders] or list(RunStore.read(Path("runs")).runs)
    if not found:
        raise InputError("there are no runs in runs/; name run folders, or create runs with `qg train`")
    return found


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "runs":                                      # `qg runs --runs DIR`, as other commands have it
        words = [word.removeprefix("--runs=") for word in words if word != "--runs"]
    call({"runs": runs, "compare": compare, "plot": plot, "status": status}, name, words)
