"""Memory: the number of runs that fit as rows of one program, from a bound or from a trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec

import torch
from torch.utils._pytree import tree_leaves

from quasiglobal.common.memory import USABLE, free_bytes, is_out_of_memory
from quasiglobal.engines.costs import tensors_of_edges, traffic
from quasiglobal.errors import InputError
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.stacked.capture import release
from quasiglobal.stacked.one_model import arguments
from quasiglobal.stacked.precision import PRECISIONS
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task

log = logging.getLogger("quasiglobal")

Given = ParamSpec("Given")

COPIES = 17
"""Parameter-sized temporary tensors of a step, besides x and the algorithm's state: more than any step needs."""

MEASURED_USABLE = 0.9
"""Fraction of the free memory to use if the need of a run was measured; the rest is for fragmentation."""


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


def trial(program: Program, steps: int = 3) -> float:
    """Run some of the first epoch's steps and, on a GPU, the longest step and a test; return the seconds per step.

    Steps run until they are compiled and captured, so that the GPU's peak memory is that of the training. The program
    cannot be used afterwards.
    """
    on_gpu, steps = program.device.type == "cuda", min(steps, program.feed.steps_per_epoch)
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


def enough_memory(function: Callable[Given, object], *given: Given.args, **named: Given.kwargs) -> bool:
    """Call a function; return False if memory for it could not be allocated. Its tensors can be released afterwards."""
    try:
        function(*given, **named)
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
    """Bytes that all runs share, the data, and bytes of each run, from a trial on the GPU."""
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
