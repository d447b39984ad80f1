"""Result of `qg.train`: the records and the models of every seed."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch
from torch import nn

from quasiglobal.errors import InputError
from quasiglobal.runs import plots
from quasiglobal.stacked.layout import Layout
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import Ranking, Record, RecordList, number, ranking, tests
from quasiglobal.training.rows import NamedRows, models_of, module_of
from quasiglobal.training.task import Task


class TrainedRun(RecordList):
    """The records of one seed, a list with one entry per epoch, and its models."""

    def __init__(
        self, records: Sequence[Record], experiment: Experiment, task: Task, rows: Callable[[], NamedRows],
        status: str, folder: Path | None = None,
    ) -> None:
        """`rows` returns the models of all nodes; `folder` is the run folder, if there is one."""
        super().__init__(records)
        self.experiment, self.status, self.folder = experiment, status, folder
        self._task, self._rows = task, rows

    def model(self, node: int | None = None) -> nn.Module:
        """A copy of the module with the parameters and buffers of a node, or with the average over all nodes."""
        module, rows = self._task.module(0), self._rows()
        if node is not None and not 0 <= node < len(rows["x"]):
            raise InputError(f"node must be from 0 to {len(rows['x']) - 1}, got {node}")
        weights = self.experiment.resolved.weights_on(self._task.data)
        counted = None if weights is None else torch.from_numpy(weights)
        return module_of(module, rows, Layout.of_experiment(module, self.experiment.bn), node, counted)

    def average(self) -> nn.Module:
        """A copy of the module with the average of all nodes' parameters and buffers, by the experiment's weights."""
        return self.model(None)

    def in_memory(self) -> TrainedRun:
        """The same run, independent of its folder."""
        rows = models_of(self._rows())
        return TrainedRun(self, self.experiment, self._task, lambda: rows, self.status)


class Trained:
    """Result of `qg.train`. `records`, `model` and `average` are of the first seed, `runs[k]` has those of seed k."""

    def __init__(self, runs: Sequence[TrainedRun]) -> None:
        self.runs = list(runs)

    @property
    def records(self) -> list[Record]:
        """The record of every epoch of the first seed."""
        return self.runs[0]

    @property
    def status(self) -> str:
        """finished, diverged, or unfinished (stopped by Ctrl-C), of the first seed."""
        return self.runs[0].status

    @property
    def folder(self) -> Path | None:
        """The run folder of the first seed; None if there is none."""
        return self.runs[0].folder

    @property
    def score(self) -> Ranking:
        """The metric that ranks tests."""
        return ranking(self.runs[0].experiment.metric, self.records)

    def model(self, node: int | None = None) -> nn.Module:
        """The model of a node, or the average over all nodes."""
        return self.runs[0].model(node)

    def average(self) -> nn.Module:
        """The average of all nodes' models."""
        return self.runs[0].average()

    def __repr__(self) -> str:
        one, score = self.runs[0].experiment, self.score
        ends = [number(test, score.name) for run in self.runs for test in tests(run)[-1:]]
        last = [value for value in ends if value is not None]
        seeds = f"{len(self.runs)} seed{'s' if len(self.runs) > 1 else ''}"
        unit = "%" if score.percent else ""
        name = score.title.removesuffix(", %")
        reached = f", {name} {score.shown(statistics.fmean(last))}{unit}" if last else ""
        return f"<Trained: {one.algorithm} on {one.topology}, {len(self.records)} epochs, {seeds}{reached}>"

    def _repr_html_(self) -> str:
        """The curves of the score and of the training loss, for notebooks."""
        drawn = io.StringIO()
        algorithm = self.runs[0].experiment.algorithm
        figure = plots.draw_curves({algorithm: self.runs}, [algorithm], self.score)
        figure.savefig(drawn, format="svg")
        return f"<p>{escape(repr(self))}</p>{drawn.getvalue()[drawn.getvalue().index('<svg'):]}"
