"""Memory: how many runs fit as rows of one program."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from quasiglobal.algorithms import algorithm
from quasiglobal.gradients.precision import PRECISIONS
from quasiglobal.topology import count_nodes
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

USABLE = 0.75
"""The share of the free memory to use; data, tests and what allocators leave unused take the rest."""

COPIES = 17
"""Tensors of all parameters that a step makes besides x and the algorithm's state, the parts of gradients included.

Measured on an H200 for two runs of 16 MiniLM-L6 with `qg-dadam`, whose step is captured; 11 with `dadam`.
"""


def runs_that_fit(task: Task, experiments: Sequence[Experiment], device: torch.device) -> int:
    """How many runs like the largest of these fit the free memory of the device, at least one."""
    if len(experiments) == 1:                               # nothing to decide
        return 1
    largest = max(experiments, key=lambda one: _state(one.algorithm))
    return max(1, int(USABLE * free_bytes(device) // bytes_of_run(task, largest)))


def bytes_of_run(task: Task, experiment: Experiment) -> int:
    """The memory of one run's step, counted: models, the algorithm's state, and activations kept for the backward pass.

    Activations are measured on two examples. Kernels that keep fewer make the result an upper bound.
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
    return count_nodes(experiment.topology) * (activations + parameters * dtype.itemsize * tensors)


def release(device: torch.device) -> None:
    """Return a GPU's memory that a finished training held: captured graphs are part of a reference cycle."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """The memory that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:                                         # not Linux: half of the physical memory
        found = None
    here = 1024 * int(found[1]) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:                                                    # a container may have less
        used, most = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.current", "memory.max"))
    except (OSError, ValueError):
        return here
    return min(here, most - used)


def _state(name: str) -> int:
    """How many tensors like x an algorithm keeps."""
    return len(algorithm(name).init(torch.zeros(1, 1)))
