"""Commands to use before a long training: check, tune."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import UseAppendAction, arg

from quasiglobal.cli.arguments import ExperimentCommand, Json, only_simulated, parsed
from quasiglobal.cli.tables import Values, comparison, facts_table, topology_facts, topology_values
from quasiglobal.cli.terminal import (
    console,
    log_as,
    preparing,
    print_json,
    say_written,
    size_in_words,
    time_in_words,
    watcher,
)
from quasiglobal.runs import plots, tuning
from quasiglobal.runs.agreement import has_own_data, refuse_faults, trust_of
from quasiglobal.runs.estimate import estimate, prepare
from quasiglobal.training.metrics import number


@dataclass(frozen=True)
class Check(ExperimentCommand):
    """Estimate the cost of `qg train` with the same options and report likely problems. Writes nothing."""

    json: Json = False


def check(command: Check) -> None:
    """`qg check`."""
    experiment, options = command.experiment, command.options
    if options.engine == "distributed":
        refuse_faults(experiment)
        trust_of(experiment, options.trust)
    with preparing():
        task, experiments = prepare(experiment, options)
    graph = topology_values(experiment.resolved.topology_on(task.data))
    with console.status("timing a few steps"):
        taken = estimate(task, experiments, options)
    own = has_own_data(experiment)
    if own:
        console.print("each owner has its own data: its memory and the time of its tests are not counted")
    if command.json:
        print_json(graph | {"model": experiment.model, "seeds": options.seeds} | {
            UNITS.get(name, name): None if own and name == "data" else value for name, value in asdict(taken).items()
        })
        return
    nodes = f"{graph['nodes']} nodes" + (f" × {options.seeds} seeds" if options.seeds > 1 else "")
    data = "" if own else f", {size_in_words(taken.data)} for the data"
    shards = f", {size_in_words(taken.shards)} for the data" if taken.shards else ""
    most, there = size_in_words(taken.peak), size_in_words(taken.memory)
    peak = f", at most {most} of the GPU's {there}, in tests too" if taken.peak else ""
    peak += f"; {taken.together} of {options.seeds} seeds at a time" if taken.together < options.seeds else ""
    sent, rows = size_in_words(taken.sent_a_step), size_in_words(taken.rows)
    console.print(facts_table(topology_facts(graph) | {
        "model": f"{experiment.model}, {taken.parameters:,} parameters, {nodes}",
        "sent a step": f"{sent} a node, {size_in_words(taken.sent_a_step * taken.steps)} over the whole run",
        "memory": f"{rows} for models and momentum{data}{peak}",
        "disk": f"{size_in_words(taken.checkpoints)} for the checkpoints{shards}",
        "time": f"about {time_in_words(taken.seconds)}: {taken.steps:,} steps of {1000 * taken.step_seconds:.3g} ms, "
        f"and a test every {experiment.eval_every} epochs",
    }))


UNITS = {
    "sent_a_step": "sent_bytes_per_step", "rows": "models_bytes", "data": "data_bytes", "peak": "gpu_peak_bytes",
    "memory": "gpu_bytes", "together": "seeds_at_a_time", "shards": "data_on_disk_bytes",
    "checkpoints": "checkpoint_bytes",
}
"""Names in JSON of the estimate's fields in bytes."""


@dataclass(frozen=True)
class Tune(ExperimentCommand):
    """Tune the learning rate or other hyperparameters on a grid that grows until the best point lies inside it.

    Trials use the experiment's seed; then all --seeds run at the best point. Finished runs are not run again.
    """

    over: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME=VALUES")] = ()
    """Names to tune and their values, as in lr=0.1,0.2,0.4,beta=0.8,0.9, or one --over per name. A name is a field
    of the experiment or an option of the algorithm; all combinations are tried. The default, lr without values,
    tries three rates around the experiment's own."""
    cap: int = tuning.CAP
    """Maximum number of trials of a growing grid; 0: the grid does not grow."""
    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw the grid into this file (.png, .svg or .pdf): a curve for one name, a heat map for two."""
    json: Json = False


def tune(command: Tune) -> None:
    """`qg tune`."""
    experiment, options, plot = command.experiment, command.options, command.plot
    only_simulated("tune", options)
    log_as(options.log)
    names = tuning.parse_over(",".join(command.over or ("lr",)))
    if plot is not None:
        plots.check_drawable(plot, names)
    with watcher(options.log) as watch:
        (tuned,) = tuning.tune([experiment], names, options, command.cap, watch)
    if command.json:
        print_json(_tuned_values(tuned))
    else:
        _show_tuned(tuned, command.cap)
    if plot is not None:
        plots.save_as(plots.draw_tuning(tuned.grid, tuned.scores, tuned.best, tuned.trials[tuned.best].ranking()), plot)
        say_written([plot])


def _tuned_values(tuned: tuning.Tuned) -> Values:
    """The result of a tuning as raw values."""
    def at(point: tuple[float, ...]) -> dict[str, float]:
        return dict(zip(tuned.grid, point, strict=True))

    score = tuned.trials[tuned.best].ranking()
    trials = [
        {**at(point), "score": number(run.summary.last if run.summary else None, score.name), "status": run.status,
         "run": str(run.folder)}
        for point, run in sorted(tuned.trials.items())
    ]
    best = at(tuned.best) if any(map(math.isfinite, tuned.scores.values())) else None
    return {
        "metric": score.name, "best": best, "inside": tuned.inside, "trials": trials,
        "settings": comparison(tuned.runs).rows,
    }


def _show_tuned(tuned: tuning.Tuned, cap: int) -> None:
    """Print the grid, the best point and its runs."""
    console.print(_grid(tuned))
    best = ", ".join(f"{name} = {value:g}" for name, value in zip(tuned.grid, tuned.best, strict=True))
    beyond = f"; it lies at an end of the grid: raise --cap above {cap}, or try other values"
    said = f"best: {best}, of {len(tuned.trials)} trials with seed {tuned.experiment.seed}"
    said += "" if tuned.inside else beyond
    if not any(map(math.isfinite, tuned.scores.values())):
        said = f"all {len(tuned.trials)} trials diverged; give other values with --over"
    console.print(said, soft_wrap=True)
    comparison(tuned.runs).show()


def _grid(tuned: tuning.Tuned) -> Table:
    """A table of the score at every point, with the best marked; of two names, the second is in the columns."""
    score = tuned.trials[tuned.best].ranking()

    def cell(point: tuple[float, ...]) -> str:
        reached = tuned.scores[point]
        text = score.shown(-reached if score.lower else reached) if math.isfinite(reached) else "diverged"
        return f"{text} ← best" if point == tuned.best and math.isfinite(reached) else text

    names = list(tuned.grid)
    if len(names) != 2:
        table = Table(*names, score.title)
        for point in sorted(tuned.trials):
            table.add_row(*(f"{value:g}" for value in point), cell(point))
        return table
    rows, columns = tuned.grid.values()
    table = Table(names[0], *(f"{names[1]} = {value:g}" for value in columns), title=score.title)
    for low in rows:
        table.add_row(f"{low:g}", *(cell((low, high)) for high in columns))
    return table


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "check":
        check(parsed(Check, name, words))
    else:
        tune(parsed(Tune, name, words))
