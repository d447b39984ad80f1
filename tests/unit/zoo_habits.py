"""Networks for `zoo.py`: what users do in a module besides calling layers, such as hooks, checkpoints and buffers."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint


class Convolutions(nn.Module):
    """Two convolutions, with something between them."""

    def __init__(self, width=6, classes=10):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, stride=2), nn.Conv2d(width, width, 3)
        self.head = nn.Linear(width, classes)

    def between(self, x):
        return x

    def forward(self, x):
        return self.head(functional.silu(self.second(self.between(functional.silu(self.first(x))))).mean((2, 3)))


class Layers(nn.Module):
    """Two linear layers."""

    def __init__(self, inputs=6, width=8, classes=5):
        super().__init__()
        self.first, self.head = nn.Linear(inputs, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


class StoppedByData(Convolutions):
    """`.data` stops gradients."""

    def between(self, x):
        return x * (1 + x.data)


class ScaledByAHook(Convolutions):
    """A hook in the forward pass scales the gradient, if there is one."""

    def between(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.1 * gradient)
        return x


class ReadByNumPy(Convolutions):
    """NumPy reads values."""

    def between(self, x):
        return x * float(np.abs(x.detach().float().cpu().numpy()).mean())


class ChannelsLast(Convolutions):
    """Images with channels last."""

    def between(self, x):
        return x.to(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last)


class KeepsActivations(Convolutions):
    """Keeps an activation as an attribute, and branches on the data."""

    def between(self, x):
        self.kept = x.flatten(2).softmax(-1)
        return x * 2 if bool((x.mean() > -100).all()) else x


class Checkpointed(Convolutions):
    """Activation checkpointing."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.again, self.reentrant = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU()), reentrant

    def between(self, x):
        return x + (checkpoint(self.again, x, use_reentrant=self.reentrant) if self.training else self.again(x))


class PartlyFrozen(Layers):
    """A hook of a parameter stops the gradient of half of a layer."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: torch.cat([gradient[:4], 0 * gradient[4:]]))


class HalvedBackward(nn.Module):
    """A hook of a layer halves the gradient of its inputs."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Layers(classes=6), nn.Linear(6, 5)
        self.head.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))

    def forward(self, x):
        return self.head(self.body(x))


class ClippedWeights(Layers):
    """Clips its own weights in the forward pass."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.first.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class NormalisesInPlace(Layers):
    """Writes into its inputs."""

    def forward(self, x):
        return super().forward(x.sub_(0.5).div_(2))


class WritesIntoConstants(Layers):
    """Writes into tensors of ones and of equal numbers, and into an identity matrix."""

    def forward(self, x):
        y = torch.tanh(self.first(x))
        ones, equal = torch.ones_like(y), torch.full((len(x), 8), 0.5, device=x.device, dtype=y.dtype)
        matrix = torch.eye(8, device=x.device, dtype=y.dtype)
        ones[:, :4], equal[:, 0], matrix[0] = y[:, 4:], y[:, 0], y.mean(0)
        return self.head(ones * equal + y @ matrix.tril_())


class ChecksValues(Layers):
    """Checks its values, and overwrites some of them."""

    def forward(self, x):
        assert torch.isfinite(x).all()
        y = self.first(x)
        if torch.isnan(y).any():
            y = torch.zeros_like(y)
        y = y * 1.0
        y[y < -1] = -1.0
        return self.head((2 * torch.tanh(y)).clamp_(max=0.9))


class Pruned(Layers):
    """`torch.nn.utils.prune`: a mask is a buffer, and the weight an attribute."""

    def __init__(self):
        super().__init__()
        prune.random_unstructured(self.first, "weight", 0.4)


class SparseGraph(Layers):
    """A constant sparse matrix in a buffer."""

    def __init__(self):
        super().__init__(classes=3)
        near = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
        self.register_buffer("near", near.float().to_sparse())

    def forward(self, x):
        h = torch.tanh(self.first(x)).transpose(0, 1).flatten(1).to(self.near.dtype)
        with torch.autocast(x.device.type, enabled=False):  # which has no sparse products
            h = torch.sparse.mm(self.near, h).view(len(self.near), len(x), -1)
        return self.head(h.transpose(0, 1)).transpose(1, 2)


class Derivative(nn.Module):
    """A physics-informed network: the derivative of a function with respect to its inputs."""

    def __init__(self):
        super().__init__()
        self.function = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            y = self.function(x)
            return torch.cat([y, *torch.autograd.grad(y.sum(), x, create_graph=True)], 1)


class TiedPadding(nn.Module):
    """The embedding is also the head, through which its padding vector has a gradient."""

    def __init__(self, vocabulary=13, width=8):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(vocabulary, width, padding_idx=0), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.layer(self.embedding(ids))))


class Embeddings(nn.Module):
    """A table that is a parameter, and an embedding with options."""

    def __init__(self, vocabulary=13, width=8, classes=5, **options):
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, width))
        self.embedding = nn.Embedding(vocabulary, width, **options)
        self.head = nn.Linear(width, classes)

    def forward(self, ids):
        vectors = functional.embedding(ids, self.table, padding_idx=0) + self.embedding(ids)
        return self.head(torch.tanh(vectors).mean(1))


class Fourier(nn.Module):
    """A Fourier neural operator: complex weights as a parameter, or as pairs of real ones."""

    def __init__(self, as_pairs=False, width=4, modes=3):
        super().__init__()
        self.lift, self.out, self.modes, self.as_pairs = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1), modes, as_pairs
        weight = torch.randn(width, width, modes, dtype=torch.cfloat) / width
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if as_pairs else weight)

    def forward(self, x):
        x = self.lift(x)
        weight = torch.view_as_complex(self.weight) if self.as_pairs else self.weight
        waves = torch.fft.rfft(x.to(weight.real.dtype))
        y = torch.zeros_like(waves)
        y[..., : self.modes] = torch.einsum("bix,iox->box", waves[..., : self.modes], weight)
        return self.out(functional.gelu(torch.fft.irfft(y, n=x.shape[-1]) + x))


class Rotary(nn.Module):
    """Causal attention with grouped queries that are turned by the complex numbers of a buffer, as Llama's."""

    def __init__(self, vocabulary=13, width=16, heads=4, size=4, length=8):
        super().__init__()
        self.embedding, self.heads, self.size = nn.Embedding(vocabulary, width), heads, size
        self.query, self.others = nn.Linear(width, heads * size), nn.Linear(width, heads * size)
        self.norm, self.head = nn.RMSNorm(heads * size), nn.Linear(heads * size, vocabulary)
        angles = torch.outer(torch.arange(length), 100 ** -torch.arange(0, 1, 2 / size))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x):
        pairs = x.to(self.turns.real.dtype).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(pairs) * self.turns).flatten(-2).to(x.dtype)

    def forward(self, ids):
        x = self.embedding(ids)
        query = self.query(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        key, value = self.others(x).unflatten(-1, (2, self.heads // 2, self.size)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            self.turned(query), self.turned(key), value, None, 0.0, True, enable_gqa=True
        )
        return self.head(self.norm(y.transpose(1, 2).flatten(2)))


class Latents(nn.Module):
    """A Perceiver: a query without a batch attends to a series."""

    def __init__(self, size=4, classes=5):
        super().__init__()
        self.latents, self.others = nn.Parameter(torch.randn(1, 2, 3, size)), nn.Linear(3, 4 * size)
        self.head = nn.Linear(2 * size, classes)

    def forward(self, x):
        key, value = self.others(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(self.latents, key, value)
        return self.head(y.transpose(1, 2).flatten(2).mean(1))


class Teacher(nn.Module):
    """A frozen teacher follows the student in the forward pass, and a temporary buffer its outputs."""

    def __init__(self, width=6):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, width), nn.Linear(6, width).requires_grad_(False)
        self.predict = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            if self.training:
                for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    own.data.mul_(0.9).add_(other.data, alpha=0.1)
                self.mean.mul_(0.5).add_(0.5 * self.teacher(x).mean(0).to(self.mean.dtype))
            target = self.teacher(x) - self.mean
        return self.predict(torch.tanh(self.student(x))), target


def distance(output, target):
    """Of the prediction to the teacher's output and to the target."""
    return functional.mse_loss(*output) + functional.mse_loss(output[0], target)
