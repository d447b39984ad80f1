"""VGG-11 (configuration A) without normalisation.

K. Simonyan, A. Zisserman: Very deep convolutional networks for large-scale image recognition. ICLR 2015.
"""

from __future__ import annotations

from torch import Tensor, nn

from quasiglobal.models.layers import convolution, scaled

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11(nn.Module):
    """Eight convolutions with biases, five poolings, global average pooling, a linear layer; no dropout.

    The five poolings reduce the paper's 32 × 32 images to 1 × 1. Larger images work too.
    """

    def __init__(self, norm: str, width: float, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features = nn.Sequential()
        inputs = shape[0]
        for stage in STAGES:
            for channels in stage:
                outputs = scaled(channels, width)
                self.features.append(convolution(inputs, outputs, bias=True)).append(nn.ReLU())
                inputs = outputs
            self.features.append(nn.MaxPool2d(2))
        self.head: nn.Module = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean(dim=(-2, -1)))
        return logits


class VGG11Dropout(VGG11):
    """VGG11 with two hidden layers of 512 units after the convolutions, and dropout 0.5 before each of them.

    T. Vogels et al.: RelaySum for decentralized deep learning on heterogeneous data. NeurIPS 2021.
    """

    def __init__(self, norm: str, width: float, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(norm, width, classes, shape)
        units = scaled(STAGES[-1][-1], width)
        self.head = nn.Sequential(
            nn.Dropout(), nn.Linear(units, units), nn.ReLU(),
            nn.Dropout(), nn.Linear(units, units), nn.ReLU(),
            nn.Linear(units, classes),
        )
