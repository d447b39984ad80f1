"""Convolutional classifiers after well-known papers, small: one module per network, as users write them."""

import torch
from torch import nn
from torch.nn import functional


def conv_norm(inputs, outputs, kernel, activation=nn.ReLU, **options):
    """A convolution without bias that keeps the size, BatchNorm, and an activation if there is one."""
    layers = [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([activation()] if activation else []))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand, self.reduce = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.reduce(functional.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Depthwise 7 × 7 convolutions, LayerNorm over channels by permute, GELU, layer scale."""

    def __init__(self, widths=(6, 12), depths=(1, 1), patch=2, classes=10):
        super().__init__()
        layers = [nn.Conv2d(3, widths[0], patch, stride=patch), ChannelNorm(widths[0])]
        for before, width, depth in zip((None, *widths), widths, depths, strict=False):
            if before:
                layers += [ChannelNorm(before), nn.Conv2d(before, width, 2, stride=2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x):
        return self.head(self.norm(self.features(x).mean((2, 3))))


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        inner = inputs * expansion
        self.layers = nn.Sequential(
            conv_norm(inputs, inner, 1, nn.ReLU6),
            conv_norm(inner, inner, 3, nn.ReLU6, stride=stride, groups=inner),
            conv_norm(inner, outputs, 1, None),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nn.Module):
    """Inverted residuals with depthwise convolutions, ReLU6, dropout before the head."""

    def __init__(self, width=4, blocks=((2, 2), (2, 1)), expansion=3, dropout=0.2, classes=10):
        super().__init__()
        layers, inputs = [conv_norm(3, width, 3, nn.ReLU6, stride=2)], width
        for factor, stride in blocks:
            layers.append(InvertedResidual(inputs, width * factor, stride, expansion))
            inputs = width * factor
        layers.append(conv_norm(inputs, 4 * inputs, 1, nn.ReLU6))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(4 * inputs, classes))

    def forward(self, x):
        return self.classifier(functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class SqueezeExcite(nn.Module):
    def __init__(self, width, squeezed, activation=nn.ReLU, gate=nn.Hardsigmoid):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.layers = nn.Sequential(
            nn.Conv2d(width, squeezed, 1), activation(), nn.Conv2d(squeezed, width, 1), gate()
        )

    def forward(self, x):
        return x * self.layers(self.pool(x))


class MobileNetV3(nn.Module):
    """Hardswish, squeeze-and-excite with hard sigmoids, 5 × 5 depthwise convolutions."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.stem = conv_norm(3, width, 3, nn.Hardswish, stride=2)
        self.expand = conv_norm(width, 2 * width, 1, nn.Hardswish)
        self.depthwise = conv_norm(2 * width, 2 * width, 5, nn.Hardswish, groups=2 * width)
        self.excite = SqueezeExcite(2 * width, width)
        self.project = conv_norm(2 * width, width, 1, None)
        self.hidden, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.project(self.excite(self.depthwise(self.expand(x))))
        return self.head(functional.hardswish(self.hidden(x.mean([2, 3])), inplace=True))


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 2 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(functional.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y)))], dim=1)


class DenseNet(nn.Module):
    """Concatenated features, BatchNorm before each convolution, average pooling between the blocks."""

    def __init__(self, growth=4, depths=(2, 1), classes=10):
        super().__init__()
        width = 2 * growth
        layers = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        for at, depth in enumerate(depths):
            if at:
                layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False)]
                layers += [nn.AvgPool2d(2)]
                width //= 2
            for _ in range(depth):
                layers.append(DenseLayer(width, growth))
                width += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(functional.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1))


class MBConv(nn.Module):
    def __init__(self, inputs, outputs, stride, expansion, survival):
        super().__init__()
        inner = inputs * expansion
        self.layers = nn.Sequential(
            conv_norm(inputs, inner, 1, nn.SiLU),
            conv_norm(inner, inner, 3, nn.SiLU, stride=stride, groups=inner),
            SqueezeExcite(inner, max(1, inputs // 4), nn.SiLU, nn.Sigmoid),
            conv_norm(inner, outputs, 1, None),
        )
        self.survival, self.residual = survival, stride == 1 and inputs == outputs

    def forward(self, x):
        y = self.layers(x)
        if not self.residual:
            return y
        if self.training:                                   # stochastic depth: some examples skip the block
            y = y * (torch.rand(len(x), 1, 1, 1, device=x.device) < self.survival) / self.survival
        return x + y


class EfficientNet(nn.Module):
    """SiLU, squeeze-and-excite, stochastic depth by `torch.rand`."""

    def __init__(self, width=4, blocks=((2, 2), (2, 1)), expansion=3, survival=0.6, classes=10):
        super().__init__()
        layers, inputs = [conv_norm(3, width, 3, nn.SiLU, stride=2)], width
        for factor, stride in blocks:
            layers.append(MBConv(inputs, width * factor, stride, expansion, survival))
            inputs = width * factor
        self.features, self.head = nn.Sequential(*layers), nn.Linear(inputs, classes)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class ResNeXtBlock(nn.Module):
    def __init__(self, inputs, outputs, groups, stride=1):
        super().__init__()
        inner = outputs // 2
        self.layers = nn.Sequential(
            conv_norm(inputs, inner, 1),
            conv_norm(inner, inner, 3, stride=stride, groups=groups),
            conv_norm(inner, outputs, 1, None),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, None, stride=stride)

    def forward(self, x):
        return functional.relu(self.layers(x) + self.shortcut(x), inplace=True)


class ResNeXt(nn.Module):
    """Bottlenecks with grouped convolutions, and a max-pooled stem."""

    def __init__(self, width=16, groups=4, strides=(1, 2), classes=10):
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, width, 3), nn.MaxPool2d(3, stride=2, padding=1))
        blocks = [
            ResNeXtBlock(width << max(0, at - 1), width << at, groups, stride) for at, stride in enumerate(strides)
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width << (len(strides) - 1), classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Inception(nn.Module):
    """Parallel branches: 1 × 1, 1 × 3 and 3 × 1, two 3 × 3, and pooling, concatenated."""

    def __init__(self, width=4, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU())
        self.one = nn.Conv2d(width, width, 1)
        self.factored = nn.Sequential(
            nn.Conv2d(width, width, (1, 3), padding=(0, 1)), nn.ReLU(), nn.Conv2d(width, width, (3, 1), padding=(1, 0))
        )
        self.twice = nn.Sequential(
            nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(width, width, 1))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([self.one(x), self.factored(x), self.twice(x), self.pooled(x)], 1).relu_()
        return self.head(x.mean((2, 3)))


def shuffle_channels(x, groups):
    batch, channels, height, width = x.shape
    x = x.view(batch, groups, channels // groups, height, width).transpose(1, 2)
    return x.contiguous().view(batch, channels, height, width)


class ShuffleNet(nn.Module):
    """Halves of the channels by chunk, depthwise convolutions, channel shuffle."""

    def __init__(self, width=8, depth=2, classes=10):
        super().__init__()
        half = width // 2
        self.stem = conv_norm(3, width, 3, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                conv_norm(half, half, 1), conv_norm(half, half, 3, None, groups=half), conv_norm(half, half, 1)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            kept, changed = x.chunk(2, dim=1)
            x = shuffle_channels(torch.cat((kept, block(changed)), dim=1), 2)
        return self.head(x.mean([2, 3]))


class Fire(nn.Module):
    def __init__(self, inputs, squeezed, expanded):
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.one, self.three = nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x):
        x = functional.relu(self.squeeze(x), inplace=True)
        return torch.cat([functional.relu(self.one(x)), functional.relu(self.three(x))], 1)


class SqueezeNet(nn.Module):
    """Fire modules, max pooling with ceil_mode, a convolution as head behind dropout."""

    def __init__(self, width=4, dropout=0.5, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4 * width, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, ceil_mode=True),
            Fire(4 * width, width, 2 * width), Fire(4 * width, width, 4 * width),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Conv2d(8 * width, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x):
        return torch.flatten(self.classifier(self.features(x)), 1)


class Ghost(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.primary = conv_norm(inputs, outputs // 2, 1)
        self.cheap = conv_norm(outputs // 2, outputs - outputs // 2, 3, groups=outputs // 2)
        self.outputs = outputs

    def forward(self, x):
        first = self.primary(x)
        return torch.cat([first, self.cheap(first)], dim=1)[:, : self.outputs, :, :]


class GhostNet(nn.Module):
    """Half of the features from cheap depthwise convolutions of the other half."""

    def __init__(self, width=8, classes=10):
        super().__init__()
        self.stem = conv_norm(3, width, 3, stride=2)
        self.expand, self.reduce = Ghost(width, 2 * width), Ghost(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.reduce(self.expand(x))).mean((2, 3)))


class RepVGGBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.three = conv_norm(inputs, outputs, 3, None, stride=stride)
        self.one = conv_norm(inputs, outputs, 1, None, stride=stride)
        self.identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None

    def forward(self, x):
        return functional.relu(self.three(x) + self.one(x) + (0 if self.identity is None else self.identity(x)))


class RepVGG(nn.Module):
    """Sums of a 3 × 3, a 1 × 1 and an identity branch, each with BatchNorm."""

    def __init__(self, width=6, strides=(2, 1), classes=10):
        super().__init__()
        inputs = (3, *(width for _ in strides))
        self.blocks = nn.Sequential(*map(RepVGGBlock, inputs, inputs[1:], strides))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x).mean(dim=(2, 3)))
