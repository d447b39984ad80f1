"""Networks on sequences, volumes, texts, graphs, sets and tables, as users write them."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm


class Conv1d(nn.Module):
    """Convolutions over time with BatchNorm and pooling."""

    def __init__(self, inputs=3, width=6, classes=5):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(inputs, width, 7, stride=2, padding=3), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(width, 2 * width, 3, padding=1, groups=2), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, classes),
        )

    def forward(self, x):
        return self.layers(x)


class Conv3d(nn.Module):
    """Convolutions over volumes with BatchNorm, pooling and a transposed convolution."""

    def __init__(self, width=4, classes=5):
        super().__init__()
        self.first, self.norm = nn.Conv3d(1, width, 3, stride=(1, 2, 2), padding=1), nn.BatchNorm3d(width)
        self.second = nn.Conv3d(width, width, (1, 3, 3), padding=(0, 1, 1))
        self.up = nn.ConvTranspose3d(width, width, 2, stride=2)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = functional.max_pool3d(functional.relu(self.norm(self.first(x))), 2)
        x = self.up(functional.relu(self.second(x)))
        return self.head(functional.adaptive_avg_pool3d(x, 1).flatten(1))


class TemporalBlock(nn.Module):
    def __init__(self, inputs, outputs, dilation, kernel=3, dropout=0.1):
        super().__init__()
        self.pad = (kernel - 1) * dilation
        self.conv = weight_norm(nn.Conv1d(inputs, outputs, kernel, padding=self.pad, dilation=dilation))
        self.dropout, self.shortcut = nn.Dropout(dropout), nn.Conv1d(inputs, outputs, 1)

    def forward(self, x):
        y = self.conv(x)[:, :, : -self.pad].contiguous()     # causal
        return functional.relu(self.dropout(functional.relu(y)) + self.shortcut(x))


class TemporalConvolutions(nn.Module):
    """Causal dilated convolutions with weight normalisation and dropout; a label for each time."""

    def __init__(self, inputs=3, width=6, depth=3, classes=5):
        super().__init__()
        widths = [inputs] + [width] * depth
        self.blocks = nn.Sequential(*(TemporalBlock(widths[i], width, 2**i) for i in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x).transpose(1, 2)).transpose(1, 2)


class LSTM(nn.Module):
    """Two bidirectional layers with dropout between them; the head reads the last states."""

    def __init__(self, inputs=3, width=6, classes=5):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        _, (h, _) = self.lstm(x)
        return self.head(torch.cat([h[-2], h[-1]], dim=1))


class GRU(nn.Module):
    """Two layers; the head reads the output at the last time."""

    def __init__(self, inputs=3, width=6, depth=2, classes=5):
        super().__init__()
        self.gru, self.head = nn.GRU(inputs, width, depth, batch_first=True), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


class RNN(nn.Module):
    """A plain recurrent layer, time first, from a learned initial state."""

    def __init__(self, inputs=3, width=6, classes=5):
        super().__init__()
        self.rnn, self.head = nn.RNN(inputs, width, nonlinearity="relu"), nn.Linear(width, classes)
        self.start = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x):
        y, _ = self.rnn(x.transpose(0, 1), self.start.expand(1, len(x), -1).contiguous())
        return self.head(y.mean(dim=0))


class CellLoop(nn.Module):
    """An LSTM cell in a loop over time, with states of zeros; the outputs are written into a new tensor."""

    def __init__(self, inputs=3, width=6, classes=5):
        super().__init__()
        self.cell, self.head, self.width = nn.LSTMCell(inputs, width), nn.Linear(width, classes), width

    def forward(self, x):
        batch, length, _ = x.shape
        h = torch.zeros(batch, self.width, device=x.device, dtype=x.dtype)
        c = torch.zeros_like(h)
        outputs = torch.zeros(batch, length, self.width, device=x.device, dtype=x.dtype)
        for t in range(length):
            h, c = self.cell(x[:, t], (h, c))
            outputs[:, t] = h
        return self.head(outputs).transpose(1, 2)


class TextCNN(nn.Module):
    """Embeddings with padding, convolutions of several lengths over tokens, maximum over time, dropout."""

    def __init__(self, vocabulary=17, width=8, filters=4, kernels=(2, 3, 4), classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, kernel) for kernel in kernels)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(filters * len(kernels), classes)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        x = torch.cat([functional.relu(convolution(x)).amax(dim=2) for convolution in self.convolutions], dim=1)
        return self.head(self.dropout(x))


class BagOfWords(nn.Module):
    """The mean of a text's embeddings by `nn.EmbeddingBag`, without its padding."""

    def __init__(self, vocabulary=17, width=8, classes=5):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(vocabulary, width, mode="mean", padding_idx=0), nn.Linear(width, classes)

    def forward(self, ids):
        return self.head(torch.tanh(self.bag(ids)))


class GraphNetwork(nn.Module):
    """Graph convolutions on a dense adjacency matrix, and attention between the neighbours; a label for each vertex."""

    def __init__(self, inputs=4, width=8, classes=3):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)
        self.source, self.sink = nn.Linear(width, 1), nn.Linear(width, 1)
        self.head = nn.Linear(width, classes)

    def forward(self, features, adjacency):
        adjacency = adjacency + torch.eye(adjacency.shape[-1], device=adjacency.device, dtype=adjacency.dtype)
        root = adjacency.sum(dim=-1).rsqrt()
        normalised = root[..., None] * adjacency * root[..., None, :]
        x = functional.relu(torch.bmm(normalised, self.first(features)))
        scores = functional.leaky_relu(self.source(x) + self.sink(x).mT, 0.2)
        attention = scores.masked_fill(adjacency == 0, float("-inf")).softmax(dim=-1)
        return self.head(attention @ self.second(x)).mT


class DeepSets(nn.Module):
    """A sum over the set's elements, which may be missing (a mask), between two networks; inputs are a dict."""

    def __init__(self, inputs=3, width=8):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width))
        self.rho = nn.Sequential(nn.Linear(width, width), nn.GLU(), nn.Linear(width // 2, 1))

    def forward(self, elements, present):
        return self.rho((self.phi(elements) * present[..., None]).sum(dim=1))


class PointNet(nn.Module):
    """A learned transform of the points, shared layers by 1 × 1 convolutions, the maximum over the points."""

    def __init__(self, width=8, classes=5):
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU())
        self.matrix = nn.Linear(width, 9)
        self.shared = nn.Sequential(
            nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU(), nn.Conv1d(width, width, 1)
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, points):
        x = points.transpose(1, 2)
        matrix = self.matrix(self.transform(x).max(dim=2)[0]).view(-1, 3, 3)
        matrix = matrix + torch.eye(3, device=x.device, dtype=x.dtype)
        return self.head(torch.max(self.shared(torch.bmm(matrix, x)), 2)[0])


class Highway(nn.Module):
    """Gated layers, and a Maxout layer behind them."""

    def __init__(self, inputs=6, width=8, pieces=3, classes=5):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers, self.gates = (nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(2))
        self.maxout, self.pieces = nn.Linear(width, width * pieces), pieces
        self.head = weight_norm(nn.Linear(width, classes))

    def forward(self, x):
        x = self.stem(x)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            open_ = torch.sigmoid(gate(x) - 1)
            x = open_ * functional.relu(layer(x)) + (1 - open_) * x
        return self.head(self.maxout(x).view(len(x), -1, self.pieces).max(dim=-1).values)


class Tabular(nn.Module):
    """Numbers and two categories: embeddings and their bilinear form, BatchNorm1d, dropout; inputs are a tuple."""

    def __init__(self, numbers=4, categories=(3, 7), width=6):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, width) for count in categories)
        self.norm, self.linear = nn.BatchNorm1d(numbers), nn.Linear(numbers, width)
        self.pair = nn.Bilinear(width, width, width)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(2 * width, 1)

    def forward(self, numbers, categories):
        x = functional.silu(self.linear(self.norm(numbers)))
        first, second = (table(categories[:, at]) for at, table in enumerate(self.embeddings))
        return self.head(self.dropout(torch.cat([x, self.pair(first, second)], dim=1)))[:, 0]
