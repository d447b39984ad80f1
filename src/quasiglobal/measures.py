"""What is measured of a network's models."""

from __future__ import annotations

from torch import Tensor


def consensus_distance(x: Tensor) -> Tensor:
    """Ξ² = mean over nodes of ‖x_i − x̄‖², of [..., n, d].

    >>> import torch
    >>> consensus_distance(torch.tensor([[0.0, 0.0], [2.0, 0.0]])).item()
    1.0
    """
    return (x - x.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)


def path_length(points: Tensor) -> Tensor:
    """The length of the way through the points of [steps, d].

    >>> import torch
    >>> path_length(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])).item()
    6.0
    """
    return points.diff(dim=0).square().sum(dim=-1).sqrt().sum()
