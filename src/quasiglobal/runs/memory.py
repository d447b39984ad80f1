"""How many runs can be rows of one program: as many as the memory holds."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from quasiglobal.algorithms import algorithm
from quasiglobal.gradients.stack import PRECISIONS
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Task

USABLE = 0.75
"""Of the free memory; the data, the tests and what allocators leave unused take the rest."""

COPIES = 17
"""Tensors of all parameters that a step makes besides x and the algorithm's state, the parts of gradients included.

So many on an H200 for two runs of 16 MiniLM-L6 with `qg-dadam`, whose step is captured; 11 with `dadam`.
"""


def runs_that_fit(task: Task, experiments: Sequence[Experiment], device: torch.device) -> int:
    """How many runs like the largest of these fit the free memory of the device, at least one."""
    if len(experiments) == 1:                               # then it need not be tried
        return 1
    largest = max(experiments, key=lambda one: _state(one.algorithm))
    return max(1, int(USABLE * free_bytes(device) // bytes_of_run(task, largest)))


def bytes_of_run(task: Task, experiment: Experiment) -> int:
    """What a step of one run takes, counted: its models, the algorithm's state, and what backward needs of forward.

    The last is measured on two examples. Kernels that keep less make it an upper bound.
    """
    dtype = PRECISIONS[experiment.precision]
    module = task.module(0).to(dtype).train()
    parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    tried = 2
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        module(task.data.blank(tried, dtype))
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own) * experiment.batch // tried
    tensors = 1 + _state(experiment.algorithm) + COPIES
    return parse(experiment.topology).n * (activations + parameters * dtype.itemsize * tensors)


def give_back(device: torch.device) -> None:
    """Let the device have what a training that is over has held: its captured graphs are part of a cycle."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _state(name: str) -> int:
    """How many tensors like x an algorithm keeps."""
    return len(algorithm(name).init(torch.zeros(1, 1)))


def free_bytes(device: torch.device) -> int:
    """What is free there now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:                                         # not Linux: half of what there is
        found = None
    here = 1024 * int(found[1]) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:                                                    # a container may have less
        used, most = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.current", "memory.max"))
    except (OSError, ValueError):
        return here
    return min(here, most - used)
