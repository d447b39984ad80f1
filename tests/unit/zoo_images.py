"""Networks on images beyond classifiers of one family: dense outputs, odd layers, buffers, in-place operations."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


def twice_convolved(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels with BatchNorm, transposed convolutions back up, concatenated shortcuts; one label per pixel."""

    def __init__(self, width=4, classes=3):
        super().__init__()
        self.down1, self.down2 = twice_convolved(3, width), twice_convolved(width, 2 * width)
        self.middle = twice_convolved(2 * width, 4 * width)
        self.up2, self.up1 = (nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in (2 * width, width))
        self.back2, self.back1 = (twice_convolved(2 * size, size) for size in (2 * width, width))
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        x = self.up2(self.middle(functional.max_pool2d(second, 2)))
        x = self.up1(self.back2(torch.cat([x, second], dim=1)))
        return self.out(self.back1(torch.cat([x, first], dim=1)))


class DeepLab(nn.Module):
    """Atrous spatial pyramid: dilated 3 × 3 convolutions and image features side by side, upsampled to the input."""

    def __init__(self, width=6, rates=(1, 2, 3), classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.pyramid = nn.ModuleList(nn.Conv2d(width, width, 3, padding=rate, dilation=rate) for rate in rates)
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.ReLU())
        self.project = nn.Conv2d(width * (len(rates) + 1), width, 1)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        y = self.stem(x)
        whole = functional.interpolate(self.whole(y), size=y.shape[-2:], mode="bilinear", align_corners=False)
        y = self.project(torch.cat([*(branch(y).relu() for branch in self.pyramid), whole], dim=1))
        return functional.interpolate(self.out(y), size=x.shape[-2:], mode="bilinear", align_corners=False)


class SuperResolution(nn.Module):
    """Twice the side by pixel shuffle, added to the image upsampled by bicubic interpolation."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 5, padding=2), nn.Conv2d(width, width, 3, padding=1)
        self.slope, self.last, self.shuffle = nn.PReLU(width), nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2)

    def forward(self, x):
        y = self.slope(self.second(torch.tanh(self.first(x))))
        return self.shuffle(self.last(y)) + functional.interpolate(x, scale_factor=2, mode="bicubic")


class Autoencoder(nn.Module):
    """Strided convolutions to a code; back by bilinear upsampling and an overlapping transposed convolution."""

    def __init__(self, width=4, code=8, side=16):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ELU(), nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.ELU(), nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, code),
        )
        self.decode = nn.Sequential(
            nn.Linear(code, 2 * width * (side // 4) ** 2), nn.Unflatten(1, (2 * width, side // 4, side // 4)), nn.ELU(),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * width, width, 3, padding=1), nn.ELU(),
            nn.ConvTranspose2d(width, 3, 3, stride=2, padding=1, output_padding=1), nn.Sigmoid(),
        )

    def forward(self, x):
        return self.decode(self.encode(x))


class VariationalAutoencoder(nn.Module):
    """Returns the image, the mean and the log-variance of the code, which is drawn by `randn_like`."""

    def __init__(self, width=4, code=5, side=16):
        super().__init__()
        self.side, self.width = side // 4, width
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten(),
        )
        self.mean, self.log_variance = (nn.Linear(width * self.side**2, code) for _ in range(2))
        self.start = nn.Linear(code, width * self.side**2)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
        )

    def forward(self, x):
        y = self.encode(x)
        mean, log_variance = self.mean(y), self.log_variance(y)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(self.start(code).view(-1, self.width, self.side, self.side)), mean, log_variance


def evidence_bound(output, target):
    image, mean, log_variance = output
    divergence = -0.5 * torch.mean(1 + log_variance - mean.pow(2) - log_variance.exp())
    return functional.mse_loss(image, target) + 0.1 * divergence


class OddKernels(nn.Module):
    """Even and oblong kernels, strides, paddings and dilations; reflect, circular and replicate padding; `same`."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=(2, 1), padding=(1, 2)), nn.PReLU(),
            nn.Conv2d(width, width, (3, 5), padding="same", dilation=(2, 1)),
            nn.InstanceNorm2d(width, affine=True), nn.Mish(),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect"), nn.Softplus(),
            nn.Conv2d(width, width, (3, 1), padding=(2, 0), dilation=(2, 1), padding_mode="circular"), nn.GELU("tanh"),
            nn.ZeroPad2d((1, 0, 0, 2)), nn.Conv2d(width, width, 2, stride=(1, 2), groups=2, padding_mode="replicate"),
        )
        self.shortcut = nn.Conv2d(3, width, 1, stride=(2, 2), bias=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        y, shortcut = self.layers(x), self.shortcut(x)
        height, width = (min(sizes) for sizes in zip(y.shape[2:], shortcut.shape[2:], strict=True))
        return self.head((y[..., :height, :width] + shortcut[..., :height, :width]).mean((2, 3)))


class Norms(nn.Module):
    """Every normalisation of images and features, with affine parameters and running statistics."""

    def __init__(self, width=12, side=8, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.instance = nn.InstanceNorm2d(width, affine=True, track_running_stats=True)
        self.response = nn.LocalResponseNorm(3)
        self.group, self.plain = nn.GroupNorm(3, width), nn.GroupNorm(2, width, affine=False)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.batch = nn.BatchNorm2d(width, momentum=0.3, eps=1e-3)
        self.layer = nn.LayerNorm([width, side, side])
        self.rms = nn.RMSNorm(width)
        self.features = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.response(functional.relu(self.instance(self.stem(x))))
        x = self.conv(self.plain(torch.tanh(self.group(x))))
        x = self.layer(functional.silu(self.batch(x)))
        x = self.rms(x.permute(0, 2, 3, 1)).mean((1, 2))
        return self.head(functional.normalize(self.features(x), dim=-1))


class Pools(nn.Module):
    """Every pooling: overlapping, padded, ceil_mode, LP, adaptive to odd sizes, and unpooling."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.stem, self.next = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.maximum = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
        self.mean = nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)
        self.pairs, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.power = nn.LPPool2d(2, (2, 3), stride=(2, 1))
        self.head = nn.Linear(width * (3 * 5 + 2 * 3), classes)

    def forward(self, x):
        x = self.stem(x)
        x = self.maximum(x) + self.mean(x)
        pooled, places = self.pairs(self.next(x))
        x = self.power(x + self.back(pooled, places, output_size=x.shape))
        x = functional.adaptive_avg_pool2d(x, (3, 5)).flatten(1), functional.adaptive_max_pool2d(x, (2, 3)).flatten(1)
        return self.head(torch.cat(x, dim=1))


class InPlace(nn.Module):
    """In-place sums, activations, masks, dropout, and writes into slices, also of new tensors."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.stem, self.skip = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(3, width, 1)
        self.body, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.3, inplace=True)
        self.head = nn.Linear(width + 1, classes)

    def forward(self, x):
        y = self.stem(x)
        y += self.skip(x)
        y.masked_fill_(y < -1, 0.5)
        y[:, 0] = x.mean(dim=1)
        y[:, 3] = x.mean()
        y[:, 1:3] *= 2
        y.relu_()
        z = self.norm(self.body(y))
        z.add_(y).clamp_(-3, 3)
        functional.leaky_relu_(z, 0.1)
        features = x.new_zeros(len(x), z.shape[1] + 1)
        features[:, :-1] = self.dropout(z.mean((2, 3)))
        features[:, -1] += y.amax((1, 2, 3))
        return self.head(features)


class Dropouts(nn.Module):
    """Every dropout: of elements, channels and features, as modules and functions; SELU."""

    def __init__(self, width=8, rate=0.2, classes=10):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, stride=2, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.channels, self.feature_alpha = nn.Dropout2d(rate), nn.FeatureAlphaDropout(rate)
        self.hidden, self.alpha = nn.Linear(width, 2 * width), nn.AlphaDropout(rate)
        self.head, self.rate = nn.Linear(2 * width, classes), rate

    def forward(self, x):
        x = self.channels(functional.relu(self.first(x)))
        x = self.feature_alpha(functional.selu(self.second(functional.dropout(x, self.rate, training=self.training))))
        x = self.alpha(functional.selu(self.hidden(x.mean((2, 3)))))
        return self.head(functional.dropout(x, self.rate, self.training))


class FrozenParts(nn.Module):
    """A frozen backbone without gradients, a frozen layer that passes them on, and trained layers around."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU())
        self.adapter, self.passing = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)
        self.backbone.requires_grad_(False)
        self.passing.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.head((x + self.passing(functional.relu(self.adapter(x)))).mean((2, 3)))


class SimSiam(nn.Module):
    """Two views of an image, by mirroring: the prediction from one, and the features of the other without gradients."""

    def __init__(self, width=6, features=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2)
        self.body = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, features)
        )
        self.predict = nn.Linear(features, features)

    def forward(self, x):
        seen, mirrored = self.stem(torch.cat([x, x.flip(-1)])).chunk(2)
        with torch.no_grad():
            target = self.body(mirrored)
        return self.predict(self.body(seen)), target


def alignment(output, _):
    prediction, target = output
    return -functional.cosine_similarity(prediction, target).mean()


class Discriminator(nn.Module):
    """Spectral and weight normalisation as parametrizations; buffers hold the power iteration's vectors."""

    def __init__(self, width=4, side=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)), nn.LeakyReLU(0.2),
            weight_norm(nn.Conv2d(2 * width, 2 * width, 3, padding=1)), nn.LeakyReLU(0.2), nn.Flatten(),
        )
        self.head = spectral_norm(nn.Linear(2 * width * (side // 4) ** 2, 1))

    def forward(self, x):
        return self.head(self.layers(x))[:, 0]


class Codebook(nn.Module):
    """Vector quantisation with a codebook in buffers: moving averages by assignment, and counts in place."""

    def __init__(self, width=6, codes=8, decay=0.9):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))
        self.decode = nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1)
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        z = self.encode(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1])
        nearest = torch.cdist(flat, self.codes).argmin(dim=1)
        if self.training:
            chosen = functional.one_hot(nearest, len(self.codes)).to(flat.dtype)
            self.counts.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
            means = chosen.T @ flat.detach() / self.counts[:, None]
            self.codes = self.decay * self.codes + (1 - self.decay) * means
            self.steps += 1
        quantised = self.codes[nearest].view_as(z)
        passed = z + (quantised - z).detach()                # straight-through
        distance = functional.mse_loss(z, quantised.detach(), reduction="none").mean((1, 2, 3))
        return self.decode(passed.permute(0, 3, 1, 2)), distance


def commitment(output, target):
    image, distance = output
    return functional.mse_loss(image, target) + 0.25 * distance.mean()


class Choosy(nn.Module):
    """Control flow that depends on the data: a branch on a tensor, and a number by `item`."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2)
        self.bright, self.dark = nn.Conv2d(width, width, 3), nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        y = torch.relu(self.stem(x))
        y = self.bright(y) if x.mean() > 0 else self.dark(y)
        return self.head(y.mean((2, 3)) / max(1e-3, y.std().item()))


class Siamese(nn.Module):
    """One network on two images; a logit for whether they belong together."""

    def __init__(self, width=4, features=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3),
            nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, features),
        )
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))

    def forward(self, left, right):
        return self.scale * functional.cosine_similarity(self.body(left), self.body(right)) + self.shift
