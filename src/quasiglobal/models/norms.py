"""Normalisation with its activation, by name.

S. Ioffe, C. Szegedy: Batch normalization. ICML 2015.
Y. Wu, K. He: Group normalization. ECCV 2018.
H. Liu, A. Brock, K. Simonyan, Q. Le: Evolving normalization-activation layers. NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quasiglobal.errors import InputError


class EvoNormS0(nn.Module):
    """x σ(x) / s · γ + β, where s² is the variance of a sample's group of channels.

    Normalisation and activation in one, without batch statistics. As in the paper's released code, the
    variance has Bessel's correction, σ has no learnable slope v, and there are min(32, C) groups. If C > 32
    is not divisible by 32, there are gcd(32, C) groups.
    """

    stacked_kernel = "evonorm"
    """Our kernel for many copies (`stacked/kernels/network.py`)."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = channels if channels <= 32 else math.gcd(32, channels)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.reshape(x.shape[0], self.groups, -1, *x.shape[2:])
        if grouped.shape[2:].numel() < 2:
            raise InputError("EvoNorm-S0 needs two numbers in a group, got one; use larger images or width")
        variance = grouped.var(dim=(2, 3, 4), correction=1, keepdim=True)
        y = (nn.functional.silu(grouped) / (variance + self.eps).sqrt()).reshape(x.shape)
        return y * self.weight[:, None, None] + self.bias[:, None, None]

    def extra_repr(self) -> str:
        return f"{self.groups}, {len(self.weight)}, eps={self.eps}"


@dataclass(frozen=True)
class Norm:
    """Layers of a residual block, in the order convolution, `inner`, convolution, `outer`, sum, `last`."""

    inner: Callable[[int], nn.Module]
    """Normalisation and activation after the stem and the first convolution; accepts the number of channels."""

    outer: Callable[[int], nn.Module]
    """Normalisation after the second convolution and in the shortcut."""

    last: Callable[[], nn.Module] = nn.ReLU
    """The activation after the sum."""

    opening: Callable[[int], nn.Module] | None = None
    """Replaces `outer` in the first block of each stage, where the shortcuts are; by default the same."""


def group_norm(channels: int) -> nn.Module:
    """Two groups, as in K. Hsieh et al.: The non-IID data quagmire of decentralized machine learning."""
    if channels % 2:
        raise InputError(f"gn needs an even number of channels for two groups, got {channels}; change width")
    return nn.GroupNorm(2, channels)


def batch_statistics(channels: int) -> nn.Module:
    """Batch normalisation without running statistics: evaluation uses the batch's statistics too."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


def _with_relu(norm: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda channels: nn.Sequential(norm(channels), nn.ReLU())


NORMS: dict[str, Norm] = {
    "bn": Norm(_with_relu(nn.BatchNorm2d), nn.BatchNorm2d),
    "gn": Norm(_with_relu(group_norm), group_norm),
    # The paper's text: EvoNorm-S0 everywhere. It includes an activation, so none follows the sum.
    "evonorm": Norm(EvoNormS0, EvoNormS0, nn.Identity),
    # The code behind the paper's tables: half of the layers are batch normalisation.
    "evonorm-released": Norm(EvoNormS0, batch_statistics),
    # Its first release, two days older, tests those of each stage's first block by running statistics.
    "evonorm-first-release": Norm(EvoNormS0, batch_statistics, opening=nn.BatchNorm2d),
    # The same training; all are tested by running statistics.
    "evonorm-running": Norm(EvoNormS0, nn.BatchNorm2d),
    "none": Norm(lambda channels: nn.ReLU(), lambda channels: nn.Identity()),
}
