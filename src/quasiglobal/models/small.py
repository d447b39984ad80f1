"""Networks that train on a CPU in seconds: for digits of 8 × 8 and Fashion-MNIST of 28 × 28 pixels.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner: Gradient-based learning applied to document recognition.
Proceedings of the IEEE 86(11), 1998.
"""

from __future__ import annotations

import math

from torch import nn

from quasiglobal.models.layers import convolution, scaled
from quasiglobal.models.norms import NORMS


def mlp(norm: str, width: float, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two hidden layers of 128 units."""
    hidden = scaled(128, width)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def cnn(norm: str, width: float, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two 3 × 3 convolutions of 16 and 32 channels, each with pooling, and a hidden layer of 128 units.

    The convolutions are normalised like the two of a residual block, and have biases if norm is none.
    """
    layer, bare = NORMS[norm], norm == "none"
    inputs, *sides = shape
    first, second, hidden = (scaled(c, width) for c in (16, 32, 128))
    return nn.Sequential(
        convolution(inputs, first, bias=bare),
        layer.inner(first),
        nn.MaxPool2d(2),
        convolution(first, second, bias=bare),
        layer.outer(second),
        layer.last(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * math.prod(side // 4 for side in sides), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
