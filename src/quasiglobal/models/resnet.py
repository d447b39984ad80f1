"""Residual networks.

K. He, X. Zhang, S. Ren, J. Sun: Deep residual learning for image recognition. CVPR 2016.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quasiglobal.models.layers import convolution, scaled
from quasiglobal.models.norms import NORMS, Norm


def cifar_resnet(depth: int, norm: str, width: float, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """ResNet for small images (Section 4.2): a 3 × 3 stem and three stages of 16, 32, 64 channels; depth 6k + 2."""
    layer = NORMS[norm]
    channels = [scaled(c, width) for c in (16, 32, 64)]
    stem = nn.Sequential(convolution(shape[0], channels[0]), layer.inner(channels[0]))
    return ResNet(stem, channels, (depth - 2) // 6, layer, classes)


def resnet18(norm: str, width: float, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """ResNet-18 for ImageNet (Table 1): a 7 × 7 stem and pooling divide the side by 4; 64 to 512 channels."""
    layer = NORMS[norm]
    channels = [scaled(c, width) for c in (64, 128, 256, 512)]
    stem = nn.Sequential(
        convolution(shape[0], channels[0], kernel=7, stride=2),
        layer.inner(channels[0]),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )
    return ResNet(stem, channels, 2, layer, classes)


class ResNet(nn.Module):
    """A stem, stages of residual blocks, global average pooling and a linear layer.

    Each stage but the first halves the image. `stem` outputs the first stage's number of channels.
    """

    def __init__(self, stem: nn.Module, channels: list[int], blocks: int, norm: Norm, classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential()
        inputs = channels[0]
        for stage, outputs in enumerate(channels):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                outer = norm.opening if norm.opening is not None and block == 0 else norm.outer
                self.stages.append(BasicBlock(inputs, outputs, stride, replace(norm, outer=outer)))
                inputs = outputs
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        logits: Tensor = self.head(x.mean(dim=(-2, -1)))
        return logits


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions with a shortcut: a 1 × 1 convolution if the shape changes, else the identity."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(inputs, outputs, stride=stride),
            norm.inner(outputs),
            convolution(outputs, outputs),
            norm.outer(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                convolution(inputs, outputs, kernel=1, stride=stride), norm.outer(outputs)
            )
        self.last = norm.last()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.residual(x) + self.shortcut(x))
        return y
