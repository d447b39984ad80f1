"""Functions shared by the networks: initialised convolutions and the width factor.

K. He, X. Zhang, S. Ren, J. Sun: Delving deep into rectifiers: surpassing human-level performance on
ImageNet classification. ICCV 2015.
"""

from __future__ import annotations

from torch import nn


def convolution(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False
) -> nn.Conv2d:
    """Padded k × k convolution; weights are drawn from N(0, √(2/(k² · outputs))), biases are 0."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def scaled(channels: int, width: float) -> int:
    """Channels times the width factor, rounded, and at least one."""
    return max(1, round(channels * width))
