"""Commands that show runs: runs, compare, plot, status."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from quasiglobal.cli.arguments import File, Folders, Json, RunArgument, RunsFolder, call, store_at
from quasiglobal.cli.terminal import Cells, Listing, Values, say_written, size_in_words, time_in_words
from quasiglobal.errors import InputError, unknown
from quasiglobal.runs import plots
from quasiglobal.runs.best import kept_in
from quasiglobal.runs.checkpoints import Part, parts_of
from quasiglobal.runs.comparison import Setting, compared
from quasiglobal.runs.store import Run, read_run
from quasiglobal.training.experiment import group_by_seed
from quasiglobal.training.metrics import Measures, Ranking, last_and_best, number

_Value = TypeVar("_Value")


def runs(folder: RunsFolder = Path("runs"), json: Json = False) -> None:
    """List the runs and their status.

    Args:
        folder: The folder of all runs.
    """
    found = store_at(folder).runs
    if not found:
        raise InputError(f"there are no runs in {folder}; name another folder, or create runs with `qg train`")
    scores = {run.folder.name: run.ranking() for run in found}
    (title, *others) = {one.title for one in scores.values()}

    def score(row: Values) -> str:
        one = scores[row["run"]]
        text = one.shown(row["score"])
        return f"{one.name} {text}{'%' if one.percent else ''}" if others and text else text

    Listing([_run_values(run) for run in found], {
        "run": "run",
        "status": "status",
        "epochs": lambda row: f"{row['epoch']}/{row['epochs']}",
        "score" if others else title: score,
        "best": lambda row: scores[row["run"]].shown(row["best"]),
    }).show(json)


def _run_values(run: Run) -> Values:
    """A run as raw values."""
    records, one, metric = run.records(), run.experiment, run.ranking().name
    last, best = (number(test, metric) for test in last_and_best(records, one.metric))
    return {
        "run": run.folder.name, "status": run.status, "epoch": len(records), "epochs": one.epochs,
        "metric": metric, "score": last, "best": best, "data": one.data, "model": one.model,
        "algorithm": one.algorithm, "topology": one.topology, "partition": one.partition,
        "alpha": one.alpha if one.uses_alpha else None, "lr": one.peak_lr, "seed": one.seed,
    }


def compare(folders: Folders = (), markdown: bool = False, json: Json = False) -> None:
    """Print a table of runs: mean ± std over the runs that differ only in their seed.

    Args:
        markdown: Print a Markdown table.
    """
    comparison(_runs_at(folders)).show(json, markdown)


def comparison(runs: Sequence[Run]) -> Listing:
    """One row per setting, mean ± std over its seeds."""
    settings = compared(runs)
    titles = {run.ranking().title for run in runs}
    title = titles.pop() if len(titles) == 1 else "score"
    headings = (title, "best, %" if title.endswith("%") else "best", "worst node", "averaged model")
    scores: dict[str, Cells] = dict(zip(headings, zip(*(one.scores for one in settings), strict=True), strict=True))
    rows = [_setting_values(one) for one in settings]
    return Listing(rows, {"setting": "setting", "seeds": "seeds", **scores, "status": "status"})


def _setting_values(one: Setting) -> Values:
    """A setting as raw values; the scores are null if a seed diverged."""
    values: Values = {"setting": one.label, "seeds": len(one.runs), "metric": one.score.name}
    for key, found in zip(("score", "best", "worst_node", "averaged_model"), one.measured, strict=True):
        values |= {key: found and found.mean, f"{key}_std": found and found.std}
    return values | {"status": one.status, "runs": [str(run.folder) for run in one.runs]}


def plot(folders: Folders = (), out: File = Path("out/curves.png"), metric: str | None = None) -> None:
    """Draw the learning curves of runs: the mean over the runs that differ only in their seed, with a band.

    Args:
        out: The file to draw into (.png, .svg or .pdf).
        metric: Entry of the records to draw instead of the score, such as test_loss, accuracy_worst or accuracy_nodes.
    """
    groups = group_by_seed(_runs_at(folders), lambda run: run.experiment)
    if len(groups) > MOST_CURVES:
        raise InputError(
            f"{len(groups)} curves in one plot are too many; name at most {MOST_CURVES} settings, as in "
            "runs/*-ring16-a0.1-* (runs that differ only in their seed are one curve)"
        )
    curves = {label: [run.records() for run in group] for label, group in groups.items()}
    algorithms = [group[0].experiment.algorithm for group in groups.values()]
    scores = {_drawn(group[0], metric) for group in groups.values()}
    if len(scores) > 1:
        raise InputError(
            f"the runs have the scores {', '.join(sorted(one.name for one in scores))}; name a --metric"
        )
    plots.save_as(plots.draw_curves(curves, algorithms, scores.pop()), out)
    say_written([out])


MOST_CURVES = 12
"""Maximum number of settings in a plot."""


def _drawn(run: Run, metric: str | None) -> Ranking:
    """The score of a run, or the named entry of its records."""
    score = run.ranking()
    if metric is None:
        return score
    entries = {name for record in run.records() for name in record}
    if metric not in entries:
        raise unknown("metric", metric, sorted(entries))
    return replace(score if metric.startswith(score.name) else Ranking(percent=False), name=metric)


def status(folder: RunArgument, json: Json = False) -> None:
    """Show the progress, traffic, lost edges and clipped neighbours of each process of a distributed run."""
    run = read_run(folder)
    parts = parts_of(run.folder)
    if not parts:
        raise InputError(f"{folder} has no parts: it was not trained with --engine distributed or `qg node`")
    newest = [measured[-1] if (measured := part.read_measures()) else None for part in parts]
    furthest = max((last["step"] for last in newest if last), default=0)
    fetched = {"fetched": run.summary.fetched if run.summary else None}
    kept = {one.node: asdict(one) for one in kept_in(run.folder)}
    rows = [
        _part_values(part, last, furthest) | {"best": [kept[node] for node in part.nodes if node in kept]} | fetched
        for part, last in zip(parts, newest, strict=True)
    ]
    Listing(rows, {
        "process": lambda row: f"process {row['process']}",
        "nodes": lambda row: _range(row["nodes"]),
        **{
            name: tuple("-" if row[name] is None else str(row[name]) for row in rows)
            for name in ("epoch", "step", "behind")
        },
        "loss": lambda row: "-" if row["loss"] is None else f"{row['loss']:.3f}",
        "sent": lambda row: _by_neighbour(row["sent_bytes"], size_in_words),
        "waited": lambda row: _by_neighbour(row["waited_seconds"], lambda seconds: f"{seconds:.1f} s"),
        "updated": lambda row: "-" if row["age_seconds"] is None else f"{time_in_words(row['age_seconds'])} ago",
        "lost edges": lambda row: "-" if row["lost"] is None else _by_neighbour(row["lost"], str) or "none",
        "clipped": lambda row: "-" if row["clipped"] is None else _by_neighbour(row["clipped"], str) or "none",
        "status": "status",
    }, brief=_in_short, caption=models_in_words(run)).show(json)


def models_in_words(run: Run) -> str:
    """Lines about a run's best models, and about the source of a last model that another node gave."""
    lines = []
    for one in kept_in(run.folder):
        score = run.ranking()
        value = "" if one.value is None else f", {score.name} {score.shown(one.value)}{'%' * score.percent}"
        lines.append(f"best model of node {one.node}: epoch {one.epoch}{value}")
    if run.summary and run.summary.fetched:
        lines.append("last model: that of node {node} ({site}), at step {step}".format(**run.summary.fetched))
    return "\n".join(lines)


def _in_short(row: Values) -> str:
    """A process in lines that fit a narrow terminal: its progress, its traffic, its lost and its clipped edges."""
    if row["step"] is None:
        return f"nodes {_range(row['nodes'])}: {row['status']}, before its first epoch"
    behind = f", {row['behind']} behind" if row["behind"] else ""
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
    sent, waited = sum(row["sent_bytes"].values()), sum(row["waited_seconds"].values())
    return "\n".join((
        f"nodes {_range(row['nodes'])}: {row['status']}, epoch {row['epoch']}, step {row['step']}{behind}, loss {loss}",
        f"sent {size_in_words(sent)}, waited {waited:.1f} s, updated {time_in_words(row['age_seconds'])} ago",
        *(f"lost the edge to {there}: {why}" for there, why in row["lost"].items()),
        *(f"clipped models of {there}: {count}" for there, count in row["clipped"].items()),
    ))


def _part_values(part: Part, last: Measures | None, furthest: int) -> Values:
    """A process of a distributed run as raw values; null before its first epoch."""
    names = ("epoch", "step", "behind", "loss", "sent_bytes", "waited_seconds", "age_seconds", "lost", "clipped")
    values: Values = {"process": part.process, "nodes": list(part.nodes), **dict.fromkeys(names)}
    if last:
        edges = last["edges"].items()
        values |= {
            "epoch": last["epoch"], "step": last["step"], "behind": furthest - last["step"], "lost": last["lost"],
            "loss": None if None in last["loss"] else statistics.fmean(last["loss"]),       # null: it diverged
            "sent_bytes": {there: one["sent"] for there, one in edges},
            "waited_seconds": {there: one["waited"] for there, one in edges},
            "age_seconds": time.time() - last["written"],
            "clipped": {there: count for there, one in edges if (count := one.get("clipped"))},
        }
    return values | {"status": part.read_status() or "training"}


def _range(nodes: Sequence[int]) -> str:
    return f"{nodes[0]}-{nodes[-1]}" if len(nodes) > 1 else str(nodes[0])


def _by_neighbour(values: Mapping[str, _Value] | None, text: Callable[[_Value], str]) -> str:
    """One value for each neighbouring process."""
    return "-" if values is None else ", ".join(f"{there}: {text(value)}" for there, value in values.items())


def _runs_at(folders: Sequence[Path]) -> list[Run]:
    found = [read_run(folder) for folder in folders] or list(store_at(Path("runs")).runs)
    if not found:
        raise InputError("there are no runs in runs/; name run folders, or create runs with `qg train`")
    return found


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "runs":                                      # `qg runs --runs DIR`, as other commands have it
        words = [word.removeprefix("--runs=") for word in words if word != "--runs"]
    call({"runs": runs, "compare": compare, "plot": plot, "status": status}, name, words)
