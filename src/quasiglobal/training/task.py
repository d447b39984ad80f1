"""Learning task: a model, a loss and data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from quasiglobal.data.dataset import Dataset
from quasiglobal.gradients.one_model import Loss


@dataclass(frozen=True)
class Task:
    """A model, a loss and data.

    `model` is an `nn.Module`, whose weights are the initial weights of every node, or a function that returns a module
    and is called with torch seeded by the run's seed. `loss(output, target)` is the mean over a batch, in training and
    in tests.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    data: Dataset

    def module(self, seed: int) -> nn.Module:
        """A new copy of the model with its initial weights."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()
