"""Cost estimate of an experiment before its launch: `qg check`."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.data.shards import Blank, Shards, undecoded
from quasiglobal.runs.agreement import agreement, has_own_data, stand_in
from quasiglobal.runs.building import model_of, task_of
from quasiglobal.runs.memory import bytes_of_data, enough_memory, fewer, runs_that_fit, trial
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import folders_of
from quasiglobal.stacked.capture import release
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task

FORWARD = 1 / 3
"""Cost of a forward pass relative to a training step, per example."""


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of an experiment with all its seeds."""

    parameters: int
    steps: int
    sent_a_step: float
    """Bytes per step, mean over the nodes."""
    rows: int
    """Bytes of x, the algorithm's state, the gradient and the models' buffers."""
    data: int
    """Bytes of the examples on the device."""
    shards: int
    """Bytes of the examples on disk, if they stay there."""
    together: int
    """Number of runs that train at a time."""
    peak: int
    """Peak memory on the GPU, as reserved by PyTorch, measured in a few steps and a test; 0 on a CPU."""
    memory: int
    """Bytes of the GPU's memory; 0 on a CPU."""
    checkpoints: int
    """Bytes of the two checkpoints kept for every run."""
    step_seconds: float
    seconds: float
    """Time of all steps and tests, without compilation."""


def prepare(experiment: Experiment, options: Options) -> tuple[Task, list[Experiment]]:
    """The task of an experiment, and the experiment with each of its seeds.

    Images are not decoded; noise stands for data that are at their owners.
    """
    own = has_own_data(experiment)
    experiment = agreement(experiment) if own else experiment
    with undecoded():
        task = stand_in(experiment) if own else task_of(experiment, options)
    return task, [folder.experiment for folder in folders_of(experiment, options)]


def estimate(task: Task, experiments: Sequence[Experiment], options: Options) -> Estimate:
    """Run a few steps of what `prepare` returns, with as many runs at a time as `train`; warn of likely problems."""
    device, found = choose_device(options.device), list[Estimate]()
    most = runs_that_fit(task, experiments, options)

    def measure(together: Sequence[Experiment]) -> None:
        program = Program(task, together, device, **options.of_program)
        found.append(_estimate(program, len(experiments), options.runs))

    while not enough_memory(measure, experiments[:most]):
        release(device)
        most = fewer(experiments[:most], device)
    return found[0]


def _estimate(program: Program, runs: int, folder: Path) -> Estimate:
    """The estimate for some runs, as many of which train together as the program has."""
    experiment, graph, state = program.experiment, program.engine.topology, program.state
    on_gpu, together = program.device.type == "cuda", len(program.experiments)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(program.device)
    step_seconds = trial(program)
    kept = [state.x, *program.bands.tensors(), *state.buffers.values()]
    saved = 2 * sum(tensor.nbytes for tensor in kept) * runs // together
    tests, rows = program.evaluation, program.bands.rows
    data = tests.data
    on_disk = [of.shards.x.nbytes for of in (data.train, data.test) if of.shards and not _fits(of.shards)]
    blank = [of.shards.x.nbytes for of in (data.train, data.test) if of.shards and _fits(of.shards)]    # not there yet
    times = -(-experiment.epochs // experiment.eval_every)
    shown = times * len(tests.data.test) * (rows + together)
    a_second = rows * experiment.batch / step_seconds
    result = Estimate(
        parameters=program.layout.size,
        steps=program.steps,
        sent_a_step=program.bands.bytes_per_step(),
        rows=sum(tensor.nbytes for tensor in kept) + state.x.nbytes,
        data=bytes_of_data(program) - sum(on_disk),
        shards=sum(on_disk),
        together=together,
        peak=torch.cuda.max_memory_reserved(program.device) + sum(blank) if on_gpu else 0,
        memory=torch.cuda.mem_get_info(program.device)[1] if on_gpu else 0,
        checkpoints=saved,
        step_seconds=step_seconds,
        seconds=(program.steps * step_seconds + FORWARD * shown / a_second) * -(-runs // together),
    )
    smallest = min(len(owner.examples) for owner in program.feed.plan.owners)
    if smallest < experiment.batch:
        warnings.warn(
            f"a node holds {smallest} examples, fewer than its batch of {experiment.batch}; use a smaller batch",
            stacklevel=2,
        )
    if isinstance(program.bands.bands[0].algorithm, Centralized) and experiment.partition != "iid" and graph.n > 1:
        warnings.warn(
            f"{experiment.algorithm} is centralized: the paper's reference uses --partition iid, "
            f"not {experiment.partition}",
            stacklevel=2,
        )
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if saved > free:
        warnings.warn(
            f"the checkpoints take {saved / 1e9:.3g} GB, but {folder} has {free / 1e9:.3g} GB left; use another --runs",
            stacklevel=2,
        )
    return result


def images_per_second(experiment: Experiment, classes: int, shape: Sequence[int], device: torch.device) -> float:
    """Training throughput of the experiment's model, measured in a few plain steps on noise; needs no data.

    The engines are as fast or faster. Use this only to tell minutes from weeks.
    """
    model = model_of(experiment, classes, shape).to(device)
    batch = 256 if device.type == "cuda" else 8
    images = torch.randn(batch, *shape, device=device)
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=experiment.precision == "bf16" and device.type == "cuda")
    took: list[float] = []          # the first step warms up; the fastest other step counts: other load only slows down
    while len(took) < 2 or (len(took) < 6 and sum(took) < 1):
        began = time.perf_counter()
        with bf16:
            loss = model(images).float().square().mean()
        loss.backward()
        loss.item()                                                 # waits for the device
        took.append(time.perf_counter() - began)
    return batch / min(took[1:])


def _fits(shards: Shards) -> bool:
    """Whether the training would keep these images in memory."""
    return isinstance(shards, Blank) and shards.in_memory
