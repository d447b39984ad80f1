"""How many runs can be rows of one program: as many as the memory holds."""

from __future__ import annotations

import os

import torch

from quasiglobal.algorithms import algorithm
from quasiglobal.experiment import Experiment
from quasiglobal.tasks.gradients import PRECISIONS
from quasiglobal.topology import parse
from quasiglobal.training import Task

USABLE = 0.7
"""Of the free memory; the data, the tests and what allocators leave unused take the rest."""

COPIES = 8
"""Tensors of all parameters that a step makes besides x and the algorithm's state, the parts of gradients included."""


def runs_that_fit(task: Task, experiment: Experiment, device: torch.device) -> int:
    """How many runs like this one fit the free memory of the device, at least one."""
    return max(1, int(USABLE * free_bytes(device) // bytes_of_run(task, experiment)))


def bytes_of_run(task: Task, experiment: Experiment) -> int:
    """What a step of one run takes, counted: its models, the algorithm's state, and what backward needs of forward.

    The last is measured on two examples. Kernels that keep less make it an upper bound.
    """
    dtype = PRECISIONS[experiment.precision]
    module = task.module(0).to(dtype).train()
    parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    state = len(algorithm(experiment.algorithm).init(torch.zeros(1, 1)))
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    tried = 2
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        module(task.data.blank(tried, dtype))
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own) * experiment.batch // tried
    return parse(experiment.topology).n * (activations + parameters * dtype.itemsize * (1 + state + COPIES))


def free_bytes(device: torch.device) -> int:
    """What is free there now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
