"""Run methods under the protocol: tune each rate on the validation split, train the seeds, and write the record."""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import statistics
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from quasiglobal.common.objects import fault
from quasiglobal.engines.costs import traffic
from quasiglobal.errors import InputError
from quasiglobal.reproduction.leaderboard.contenders import Contender, objections
from quasiglobal.reproduction.leaderboard.protocol import (
    LEARNS,
    MOST_RATES,
    SMALLER_STEPS,
    STEPS_OF_TWO,
    Condition,
    Tier,
)
from quasiglobal.reproduction.leaderboard.standings import Placing, SeedResult, Standing
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import Run, Watcher, unwatched
from quasiglobal.runs.sweep import sweep
from quasiglobal.runs.tuning import Tuned, score, tune
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import number, tests

log = logging.getLogger("quasiglobal")


def contest(
    chosen: Sequence[Contender], tier: Tier, options: Options, workers: int = 1, watch: Watcher = unwatched
) -> Iterator[Standing]:
    """Run methods under the protocol of a tier; yield the record of each as soon as it is done.

    Run folders are resumed, and finished ones are not repeated. On a GPU the trials of all methods fill one program.
    On a CPU each method has its own programs, in `workers` processes of one thread each. There, a method that fails
    does not stop the others; finally raise InputError for all that failed.
    """
    if workers < 0:
        raise InputError(f"workers must be >= 0, got {workers}")
    if choose_device(options.device).type == "cuda":
        yield from compete(chosen, tier, options, watch)
        return
    failed: dict[str, Exception] = {}
    if workers > 1:
        yield from _in_processes(chosen, tier, options, workers, failed)
    else:
        for one in chosen:
            try:
                yield from compete([one], tier, options, watch)
            except Exception as error:
                failed[one.name] = error
    for name, why in failed.items():
        log.debug(f"{name} failed", exc_info=why)
    if failed:
        said = {name: why if isinstance(why, InputError) else fault(why) for name, why in failed.items()}
        raise InputError("; ".join(f"{name} failed: {why}" for name, why in said.items()))


def _in_processes(
    chosen: Sequence[Contender], tier: Tier, options: Options, workers: int, failed: dict[str, Exception]
) -> Iterator[Standing]:
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_prepare_process)
    try:
        names = {pool.submit(_compete_alone, one, tier, options): one.name for one in chosen}
        for done in as_completed(names):
            try:
                yield done.result()
            except Exception as error:
                failed[names[done]] = error
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_process() -> None:
    """Use one thread; leave Ctrl-C to the training, which saves before it stops; end when the first process ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process once its parent has ended, also if it was killed; the runs resume from their checkpoints."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _compete_alone(one: Contender, tier: Tier, options: Options) -> Standing:
    (standing,) = compete([one], tier, options)
    return standing


# ------------------------------------------------------------------------------------------------ one method


@dataclass
class Start:
    """A method under one condition."""

    contender: Contender
    condition: Condition
    experiment: Experiment
    refused: str
    notes: tuple[str, ...]
    tuned: Tuned | None = None

    @property
    def rate(self) -> float:
        """The chosen or given learning rate."""
        return self.tuned.best[0] if self.tuned else self.contender.rates[self.condition.name]


def compete(
    chosen: Sequence[Contender], tier: Tier, options: Options, watch: Watcher = unwatched
) -> Iterator[Standing]:
    """Tune the rates of all methods together; then train the seeds of each method alone, to measure its time."""
    starts = [
        Start(one, condition, experiment, *objections(experiment))
        for one in chosen
        for condition in tier.conditions
        for experiment in [one.set_on(tier.at(condition))]
    ]
    with warnings.catch_warnings():
        for note in {note for start in starts for note in start.notes}:     # they are in the record
            warnings.filterwarnings("ignore", re.escape(note))
        if tier.validation:
            _tune([start for start in starts if not start.refused], tier, options, watch)
        for one in chosen:
            yield _train_seeds(one, tier, [start for start in starts if start.contender is one], options, watch)


def _tune(starts: Sequence[Start], tier: Tier, options: Options, watch: Watcher) -> None:
    """Choose each rate from a grid of the method's scale times powers of 2; the trials of all train together."""
    for steps in (STEPS_OF_TWO, SMALLER_STEPS + STEPS_OF_TWO):
        grids = [{"lr": [start.contender.scale(tier) * 2.0**k for k in steps]} for start in starts]
        trials = [tier.trial(start.experiment) for start in starts]
        failed = []
        for start, tuned in zip(starts, tune(trials, grids, options, MOST_RATES, watch), strict=True):
            start.tuned = tuned
            if max(tuned.scores.values()) < LEARNS:
                failed.append(start)
        starts = failed


def _train_seeds(
    one: Contender, tier: Tier, starts: Sequence[Start], options: Options, watch: Watcher
) -> Standing:
    """Train the seeds of a method under all conditions; return its record."""
    going = [start for start in starts if not start.refused]
    experiments = [replace(start.experiment, lr=start.rate, seed=seed) for start in going for seed in tier.seeds]
    runs = sweep(experiments, options, watch)
    each = len(tier.seeds)
    by_condition = {start.condition.name: runs[k * each : (k + 1) * each] for k, start in enumerate(going)}
    facts, sent = runs[0].summary if runs else None, traffic(starts[0].experiment.resolved.algorithm)
    standing = Standing(
        tier.name, one.name, one.algorithm, one.topology, one.communication, one.wire,
        central=bool(sent.everybody) and not sent.neighbours and not sent.told, published=one.published,
        device=(facts and facts.device) or "", torch=(facts and facts.torch) or "",
        conditions={start.condition.name: _placing(start, by_condition, tier) for start in starts},
    )
    trials = [run for start in going if start.tuned for run in start.tuned.trials.values()]
    for run in [*trials, *runs]:                                            # the models are no longer needed
        shutil.rmtree(run.folder / "checkpoint", ignore_errors=True)
    return standing


def _placing(start: Start, runs: dict[str, list[Run]], tier: Tier) -> Placing:
    if start.refused:
        return Placing(refused=start.refused, notes=start.notes)
    tuned = start.tuned
    trials = {f"{rate:g}": score(run) for (rate,), run in sorted(tuned.trials.items())} if tuned else {}
    reached = {rate: value if value > -math.inf else None for rate, value in trials.items()}
    return Placing(
        lr=start.rate, inside=tuned.inside if tuned else True, trials=reached, notes=start.notes,
        seeds=tuple(_result(run, tier) for run in runs[start.condition.name]),
    )


def _result(run: Run, tier: Tier) -> SeedResult:
    """The numbers of a run: the means of each node's last tests, then their mean and the worst."""
    partition = (run.summary and run.summary.partition) or ""
    if run.status != "finished":
        return SeedResult(run.experiment.seed, diverged=True, partition=partition)
    last = tests(run.records())[-tier.tests :]
    nodes = [statistics.fmean(values) for values in zip(*(record["accuracy_nodes"] for record in last), strict=True)]
    return SeedResult(
        run.experiment.seed, mean=statistics.fmean(nodes), worst=min(nodes),
        averaged=statistics.fmean(record["accuracy_averaged"] for record in last), bytes=number(last[-1], "bytes_sent"),
        seconds=_seconds(run), partition=partition,
    )


def _seconds(run: Run) -> float:
    """Time of a run: its share of the time of its program, from its fastest epoch, since others compile or wait."""
    records, rows = run.records(), run.experiment.resolved.nodes
    examples = records[0]["step"] * run.experiment.batch * rows
    return len(records) * min(examples / record["images_per_second"] for record in records)
