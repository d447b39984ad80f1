"""Callbacks for `qg.train(…, callbacks=[…])`: trackers, files, the best models, and an early end.

A callback is an object with any of the methods on_start, on_step, on_epoch and on_end. Each is called with one
argument, `run`: `run.records` (the records of the first seed so far), `run.runs[k]` (of seed k), `run.epoch`,
`run.step`, `run.model(i)` (a copy of node i's model), `run.average()` and `run.stop()`.

>>> class Print:
...     def on_epoch(self, run):
...         print(run.epoch, round(run.records[-1]["loss"], 3))
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from quasiglobal.common.files import write_csv
from quasiglobal.errors import InputError
from quasiglobal.runs.best import KeepBest
from quasiglobal.runs.callbacks import TensorBoard
from quasiglobal.training.loop import Loop
from quasiglobal.training.metrics import Ranking, Record, number, tests

__all__ = ["CSV", "EarlyStopping", "KeepBest", "MLflow", "TensorBoard", "WandB"]


class CSV:
    """Writes the records as a CSV file: records.csv in each run folder, or `path`. Lists are JSON."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)

    def on_epoch(self, run: Loop) -> None:
        """Write all records so far, atomically."""
        for k, records in enumerate(run.runs):
            if records:
                columns = list(dict.fromkeys(name for record in records for name in record))
                rows = [{name: _cell(record.get(name)) for name in columns} for record in records]
                write_csv(self._path(run, k), rows)

    def _path(self, run: Loop, k: int) -> Path:
        if self.path is None:
            return run.folders[k] / "records.csv" if run.folders else Path(f"{run.experiments[k].name}.csv")
        several = len(run.runs) > 1
        return self.path.with_stem(f"{self.path.stem}-s{run.experiments[k].seed}") if several else self.path


class WandB:
    """Logs the records to Weights & Biases, one of its runs per seed; a resumed training continues its run.

    `settings` are further arguments of `wandb.init`, such as mode="offline".
    """

    def __init__(self, project: str = "quasiglobal", **settings: object) -> None:
        self.project, self.settings = project, settings
        self._wandb = _package("wandb", "wandb")
        self._runs: list[Any] = []

    def on_start(self, run: Loop) -> None:
        """Start a run for each seed."""
        self._runs = [
            self._wandb.init(**({
                "project": self.project, "name": one.name, "id": one.name[-64:], "resume": "allow",
                "config": asdict(one), "reinit": "create_new",
            } | self.settings))
            for one in run.experiments
        ]

    def on_epoch(self, run: Loop) -> None:
        """Log the epoch's records."""
        for k, record in run.latest.items():
            self._runs[k].log(_numbers(record), step=record["epoch"])

    def on_end(self, run: Loop) -> None:
        """Finish the runs."""
        for one in self._runs:
            one.finish()


class MLflow:
    """Logs the records to MLflow, one of its runs per seed; a resumed training continues its run.

    `uri` is the tracking server or folder, by default MLflow's own setting.
    """

    def __init__(self, experiment: str = "quasiglobal", uri: str | None = None) -> None:
        self.experiment = experiment
        mlflow = _package("mlflow", "mlflow")
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
        except Exception as error:                          # such as a server or a kind of store that it lacks
            raise InputError(f"MLflow cannot open {uri or 'its store'}: {' '.join(str(error).split())[:300]}") from None
        self._metric = import_module("mlflow.entities").Metric
        self._ids: list[str] = []

    def on_start(self, run: Loop) -> None:
        """Start or find a run for each seed."""
        client = self._client
        found = client.get_experiment_by_name(self.experiment)
        where = found.experiment_id if found else client.create_experiment(self.experiment)
        self._ids = []
        for k in range(len(run.runs)):
            name = run.experiments[k].name
            earlier = client.search_runs([where], f"attributes.run_name = '{name}'") if run.runs[k] else []
            one = earlier[0] if earlier else client.create_run(where, run_name=name)
            self._ids.append(one.info.run_id)
            if not earlier:
                for field, value in asdict(run.experiments[k]).items():
                    client.log_param(one.info.run_id, field, value)

    def on_epoch(self, run: Loop) -> None:
        """Log the epoch's records."""
        for k, record in run.latest.items():
            values = [self._metric(name, value, 0, record["epoch"]) for name, value in _numbers(record).items()]
            self._client.log_batch(self._ids[k], metrics=values)

    def on_end(self, run: Loop) -> None:
        """End the runs."""
        for one in self._ids:
            self._client.set_terminated(one)


class EarlyStopping:
    """Ends the training if the score has not improved in the last `patience` tests, with any seed."""

    def __init__(
        self, patience: int = 5, min_delta: float = 0.0, metric: str | None = None, lower: bool = False
    ) -> None:
        """`min_delta` is the smallest improvement that counts; `metric` and `lower` as in `KeepBest`."""
        if patience < 1:
            raise InputError(f"patience must be >= 1 tests, got {patience}")
        self.patience, self.min_delta, self.metric, self.lower = patience, min_delta, metric, lower

    def on_start(self, run: Loop) -> None:
        """Check the name of the metric."""
        run.ranking(self.metric)

    def on_epoch(self, run: Loop) -> None:
        """End the run if no seed improved."""
        score = run.ranking(self.metric, self.lower)
        if all(self._is_stuck(records, score) for records in run.runs):
            run.stop()

    def _is_stuck(self, records: Sequence[Record], score: Ranking) -> bool:
        worth = [score.worth(number(test, score.name)) for test in tests(records)]
        if len(worth) <= self.patience:
            return False
        before, since = worth[: -self.patience], worth[-self.patience :]
        return max(since) <= max(before) + self.min_delta


def _numbers(record: Record) -> dict[str, float]:
    """The finite numbers of a record; lists are left out."""
    return {
        name: float(value) for name, value in record.items()
        if isinstance(value, int | float) and name != "epoch" and math.isfinite(value)
    }


def _cell(value: object) -> object:
    """A value for a CSV or JSON file."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return json.dumps(value) if isinstance(value, list) else value


def _package(name: str, extra: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise InputError(f"{name} is not installed: pip install 'quasiglobal[{extra}]'") from None
