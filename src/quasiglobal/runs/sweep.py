"""Sweeps: train many experiments here, or on an existing Ray cluster.

On a cluster every machine needs the package, the data, and the run folders at the same path in a shared folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from types import ModuleType

from quasiglobal.common import own_code
from quasiglobal.data.sources import data_folder
from quasiglobal.errors import InputError
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, Watcher, folders_of, unwatched
from quasiglobal.training.experiment import Experiment, grouped, setting

RETRIES = 3
"""Number of times that Ray restarts a failed or lost job, which then resumes from its checkpoint."""


def sweep(experiments: Sequence[Experiment], options: Options, watch: Watcher = unwatched) -> list[Run]:
    """Train the unfinished runs of all experiments and seeds here or on Ray (`options.on`); return all runs."""
    if options.on == "here":
        return simulate(experiments, options, watch)
    ray = _connected()
    gpus = ray.cluster_resources().get("GPU", 0) > 0
    unfinished = [
        one for one in experiments if any(folder.read_summary() is None for folder in folders_of(one, options))
    ]
    there = replace(
        options, on="here", runs=options.runs.absolute(), data_dir=data_folder(options.data_dir).absolute(),
        utilisation=options.utilisation and options.utilisation.absolute(),
    )
    own_code.check_all(map(asdict, unfinished))             # the cluster's machines do not ask
    job = ray.remote(_train).options(
        max_retries=RETRIES, retry_exceptions=True, num_gpus=1 if gpus else 0, num_cpus=0 if gpus else 1
    )
    cells = by_setting(unfinished) if gpus else [[one] for one in unfinished]
    going = {job.remote(cell, there): cell for cell in cells}
    while going:
        (done, *_), _ = ray.wait(list(going))
        cell = going.pop(done)
        refused = ray.get(done)
        if refused is not None:
            raise InputError(refused)
        finished = [folder for one in cell for folder in folders_of(one, options)]
        watch(finished, [folder.read_records()[-1] for folder in finished])
    return [folder.read() for one in experiments for folder in folders_of(one, options)]


def by_setting(experiments: Sequence[Experiment]) -> list[list[Experiment]]:
    """Group experiments that differ only in learning rate and seed: on a GPU they are rows of one program."""
    return list(grouped(experiments, setting).values())


def _train(experiments: Sequence[Experiment], options: Options) -> str | None:
    """Train on a machine of the cluster; return the message of an InputError, which a retry cannot fix."""
    try:
        simulate(experiments, options)
    except InputError as error:
        return str(error)
    return None


def _connected() -> ModuleType:
    """Ray, connected to the cluster that this machine belongs to."""
    try:
        ray = import_module("ray")
    except ImportError:
        raise InputError("Ray is not installed: pip install 'quasiglobal[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            raise InputError("no Ray cluster found; start one with `ray start --head`, or use --on here") from None
    return ray
