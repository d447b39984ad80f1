"""Memory: the number of runs that fit as rows of one program."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quasiglobal.algorithms import algorithm
from quasiglobal.common.memory import USABLE, free_bytes
from quasiglobal.gradients.one_model import arguments
from quasiglobal.gradients.precision import PRECISIONS
from quasiglobal.topology import count_nodes
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

COPIES = 17
"""Parameter-sized temporary tensors of a step, besides x and the algorithm's state; includes partial gradients.

Measured on an H200 for two runs of 16 MiniLM-L6 with `qg-dadam` and captured steps; 11 with `dadam`.
"""


def runs_that_fit(task: Task, experiments: Sequence[Experiment], device: torch.device) -> int:
    """Number of runs, each as large as the largest, that fit the free memory of the device; at least 1."""
    if len(experiments) == 1:
        return 1
    largest = max(experiments, key=lambda one: _state(one.algorithm))
    return max(1, int(USABLE * free_bytes(device) // bytes_of_run(task, largest)))


def bytes_of_run(task: Task, experiment: Experiment) -> int:
    """Bytes of one run's step: models, the algorithm's state, and activations kept for the backward pass.

    Activations are measured on two examples. The result is an upper bound, since some kernels keep fewer activations.
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
        given, named = arguments(module, task.examples(tried, dtype)[0])
        module(*given, **named)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own) * experiment.batch // tried
    tensors = 1 + _state(experiment.algorithm) + COPIES
    return count_nodes(experiment.topology) * (activations + parameters * dtype.itemsize * tensors)


def _state(name: str) -> int:
    """Number of state tensors of an algorithm."""
    return len(algorithm(name).init(torch.zeros(1, 1)))
