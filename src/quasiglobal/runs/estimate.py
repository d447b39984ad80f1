"""Memory and time of experiments: the runs that fit as rows of one program, and the estimate of `qg check`."""

from __future__ import annotations

import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.common.memory import USABLE, free_bytes, is_out_of_memory
from quasiglobal.data.shards import Blank, undecoded
from quasiglobal.engines.costs import tensors_of_edges, traffic
from quasiglobal.errors import InputError
from quasiglobal.peers.bandwidth import ON_THE_WIRE
from quasiglobal.runs.agreement import agreement, has_own_data, stand_in
from quasiglobal.runs.building import model_of, task_of
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import folders_of
from quasiglobal.stacked.capture import release
from quasiglobal.stacked.one_model import arguments
from quasiglobal.stacked.precision import PRECISIONS
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task

log = logging.getLogger("quasiglobal")

FORWARD = 1 / 3
"""Cost of a forward pass relative to a training step, per example."""

COPIES = 17
"""Parameter-sized temporary tensors of a step, besides x and the algorithm's state: more than any step needs."""

DAY = 86_400.0
"""Seconds."""

MEASURED_USABLE = 0.9
"""Fraction of the free memory to use if the need of a run was measured; the rest is for fragmentation."""


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

    def sent_a_day(self, bandwidth: float = math.inf) -> tuple[float, float]:
        """Maximum of the bytes that a node sends in a day, and the seconds per step then.

        A step takes as long as here, or as the messages on a link of so many bytes per second.
        """
        seconds = max(self.step_seconds, ON_THE_WIRE * self.sent_a_step / bandwidth)
        return self.sent_a_step * min(self.steps, DAY / seconds), seconds


def prepare(experiment: Experiment, options: Options) -> tuple[Task, list[Experiment]]:
    """The task of an experiment, and the experiment with each of its seeds.

    Images are not decoded; noise replaces the data of other owners.
    """
    own = has_own_data(experiment)
    experiment = agreement(experiment) if own else experiment
    with undecoded():
        task = stand_in(experiment) if own else task_of(experiment, options)
    return task, [folder.experiment for folder in folders_of(experiment, options)]


def estimate(task: Task, experiments: Sequence[Experiment], options: Options) -> Estimate:
    """Time a few steps of a prepared task, with as many runs at a time as in `train`; warn of likely problems."""
    device, found = choose_device(options.device), list[Estimate]()
    most = runs_that_fit(task, experiments, options)

    def measure() -> None:
        program = Program(task, experiments[:most], device, **options.of_program)
        found.append(_estimate(program, len(experiments), options.runs))

    while not enough_memory(measure):
        release(device)
        most = fewer(experiments[:most], device)
    return found[0]


def _estimate(program: Program, runs: int, folder: Path) -> Estimate:
    """The estimate for `runs` runs, in groups as large as the program's."""
    experiment, graph, state = program.experiment, program.engine.topology, program.state
    on_gpu, together = program.device.type == "cuda", len(program.experiments)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(program.device)
    step_seconds = trial(program)
    kept = [state.x, *program.bands.tensors(), *state.buffers.values()]
    saved = 2 * sum(tensor.nbytes for tensor in kept) * runs // together
    tests, rows = program.evaluation, program.bands.rows
    shards = [of.shards for of in (tests.data.train, tests.data.test) if of.shards]
    later = sum(one.x.nbytes for one in shards if isinstance(one, Blank) and one.in_memory)     # not there yet
    on_disk = sum(one.x.nbytes for one in shards) - later
    times = -(-experiment.epochs // experiment.eval_every)
    shown = times * len(tests.data.test) * (rows + together)
    a_second = rows * experiment.batch / step_seconds
    result = Estimate(
        parameters=program.layout.size,
        steps=program.steps,
        sent_a_step=program.bands.bytes_per_step(),
        rows=sum(tensor.nbytes for tensor in kept) + state.x.nbytes,
        data=bytes_of_data(program) - on_disk,
        shards=on_disk,
        together=together,
        peak=torch.cuda.max_memory_reserved(program.device) + later if on_gpu else 0,
        memory=torch.cuda.mem_get_info(program.device)[1] if on_gpu else 0,
        checkpoints=saved,
        step_seconds=step_seconds,
        seconds=(program.steps * step_seconds + FORWARD * shown / a_second) * -(-runs // together),
    )
    warn = partial(warnings.warn, stacklevel=2)
    smallest = min(len(owner.examples) for owner in program.feed.plan.owners)
    if smallest < experiment.batch:
        warn(f"a node holds {smallest} examples, fewer than its batch of {experiment.batch}; use a smaller batch")
    if isinstance(program.bands.bands[0].algorithm, Centralized) and experiment.partition != "iid" and graph.n > 1:
        reference = "the paper's reference uses --partition iid"
        warn(f"{experiment.algorithm} is centralized: {reference}, not {experiment.partition}")
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if saved > free:
        left = f"{folder} has {free / 1e9:.3g} GB left; use another --runs"
        warn(f"the checkpoints take {saved / 1e9:.3g} GB, but {left}")
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


# ---------------------------------------------------------------------------------------- memory


def runs_that_fit(task: Task, experiments: Sequence[Experiment], options: Options) -> int:
    """Number of runs, each as large as the largest, that fit the free memory of the device; at least 1.

    An upper bound of their need decides if all fit. If not, a GPU tries the largest run.
    """
    if len(experiments) == 1:
        return 1
    device = choose_device(options.device)
    largest, free = max(experiments, key=partial(_state, task)), free_bytes(device)
    by_bound = int(USABLE * free // bytes_of_run(task, largest))
    if by_bound >= len(experiments) or device.type != "cuda":
        return max(1, by_bound)
    found: list[tuple[int, int]] = []
    if not enough_memory(lambda: found.append(_measured(task, largest, device, options))):
        release(device)
        return 1                                            # the training says that a single run does not fit
    shared, own = found[0]
    return max(1, int((MEASURED_USABLE * free - shared) // own))


def bytes_of_run(task: Task, experiment: Experiment) -> int:
    """Bytes of one run's step: models, the algorithm's state, and activations kept for the backward pass.

    Activations are measured on two examples. The result is an upper bound, since some kernels keep fewer activations.
    """
    dtype = PRECISIONS[experiment.precision]
    module = task.module(0, dtype).train()
    parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    tried = 2
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        given, named = arguments(module, task.examples(tried, dtype)[0])
        module(*given, **named)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own) * experiment.batch // tried
    tensors = 1 + _state(task, experiment) + COPIES
    return experiment.resolved.nodes * (activations + parameters * dtype.itemsize * tensors)


def trial(program: Program) -> float:
    """Run some of the first epoch's steps and, on a GPU, the longest step and a test; return the seconds per step.

    Steps run until they are compiled and captured, so that the GPU's peak memory is that of the training. The program
    cannot be used afterwards.
    """
    on_gpu, steps = program.device.type == "cuda", min(3, program.feed.steps_per_epoch)
    for _ in range(4 if on_gpu else 2):
        program.begin_epoch()
        began = time.perf_counter()
        for step in range(steps):
            program.advance(step)
        program.sums()                                              # waits for the device
    took = (time.perf_counter() - began) / steps
    if on_gpu:
        longest = max(range(program.feed.steps_per_epoch), key=program.feed.shapes.__getitem__)
        for _ in range(3 if program.feed.shapes[longest] not in program.feed.shapes[:steps] else 0):
            program.begin_epoch()
            program.feed.counter.fill_(longest)
            program.advance(longest)
        program.evaluate()
    return took


def bytes_of_data(program: Program) -> int:
    """Bytes of the examples that a program keeps, on its device or on disk."""
    feed, tests = program.feed, program.evaluation
    return sum(tensor.nbytes for tensor in tree_leaves((feed.inputs.x, tests.inputs.x, feed.targets, tests.targets)))


def enough_memory(function: Callable[[], object]) -> bool:
    """Call a function; return False if memory for it could not be allocated. Its tensors can be released afterwards."""
    try:
        function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def fewer(experiments: Sequence[Experiment], device: torch.device) -> int:
    """Number of runs to try next if these do not fit the memory together; raise InputError if it is a single run."""
    one, here = experiments[0], "the GPU's memory" if device.type == "cuda" else "the memory"
    if len(experiments) == 1:
        further = ", fewer nodes, --recompute or --train lora:8" if one.reads_texts else " or fewer nodes"
        raise InputError(
            f"{one.resolved.nodes} models {one.model} with batch {one.batch} do not fit {here}; use a smaller "
            f"--batch{further}"
        )
    half = -(-len(experiments) // 2)
    log.warning(f"{len(experiments)} runs together do not fit {here}: {half} at a time")
    return half


def _measured(task: Task, experiment: Experiment, device: torch.device, options: Options) -> tuple[int, int]:
    """Bytes of the data, which all runs share, and bytes per run, measured in a trial on the GPU."""
    release(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    program = Program(task, [experiment], device, **options.of_program)
    shared = bytes_of_data(program)
    trial(program)
    peak = torch.cuda.max_memory_reserved(device) - before
    del program
    release(device)
    return shared, max(1, peak - shared)


def _state(task: Task, experiment: Experiment) -> int:
    """Number of state tensors of a node, each as large as a model."""
    chosen = experiment.resolved.algorithm
    tensors = len(chosen.init(torch.zeros(1, 1)))
    if not traffic(chosen).per_edge:
        return tensors
    per_edge = tensors_of_edges(chosen, experiment.resolved.topology_on(task.data))
    return tensors + 4 * per_edge                           # the state, what is sent, what comes, and its masked copy
