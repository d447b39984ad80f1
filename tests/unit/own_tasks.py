"""Tasks as users write them: one of each kind."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import quasiglobal as qg


class UNet(nn.Module):
    """A small U-Net: label images from images."""

    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def forward(self, x):
        first = self.down(x).relu()
        back = self.up(self.middle(first).relu())
        return self.out(torch.cat([first, back], dim=1))


class NextToken(nn.Module):
    """A recurrent language model: logits [m, T, V]."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.out = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.mix(x.cumsum(dim=1) / torch.arange(1, ids.shape[1] + 1, device=ids.device)[:, None]).tanh()
        return self.out(x)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.age = nn.Linear(16, 8), nn.Linear(1, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, image, age):
        return self.out((self.image(image.flatten(1)) + self.age(age)).tanh())


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        x = self.body(x).tanh()
        return self.kind(x), self.size(x)


class Pairs(Dataset):
    """A torch Dataset of (input, target)."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def next_token_loss(output, target):
    return functional.cross_entropy(output.transpose(1, 2), target)


def both_losses(output, target):
    kind, size = output
    return functional.cross_entropy(kind, target[:, 0].long()) + functional.mse_loss(size[:, 0], target[:, 1])


def kind_is_right(output, target):
    return (output[0].argmax(dim=1) == target[:, 0]).float()


def drawn(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size)))


def classification():
    x = drawn(200, 5)
    y = (x[:, :3]).argmax(dim=1)
    return qg.Task(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)), functional.cross_entropy, Pairs(x, y))


def regression(loss=functional.mse_loss):
    x = drawn(200, 5)
    return qg.Task(nn.Linear(5, 1), loss, (x.numpy(), x.sum(dim=1, keepdim=True).numpy()), metrics={
        "mae": qg.metrics.mae, "near": lambda output, target: ((output - target).abs() < 0.1).float(),
    })


def huber():
    return regression(nn.HuberLoss())


def multi_label():
    x = drawn(200, 5)
    return qg.Task(nn.Linear(5, 4), functional.binary_cross_entropy_with_logits, (x, (x[:, :4] > 0).float()), metrics={
        "f1": qg.metrics.f1, "accuracy": qg.metrics.accuracy,
    })


def segmentation():
    x = drawn(60, 1, 8, 8)
    return qg.Task(UNet(), functional.cross_entropy, Pairs(x, (x[:, 0] > 0).long()), metrics={
        "accuracy": qg.metrics.accuracy,
    })


def next_token():
    ids = (torch.arange(60)[:, None] + torch.arange(9) * 2) % 11
    return qg.Task(NextToken(), next_token_loss, (ids[:, :-1], ids[:, 1:]), metrics={"accuracy": qg.metrics.accuracy})


def several_inputs():
    image, age = drawn(120, 1, 4, 4), drawn(120, 1)
    y = (image.mean(dim=(1, 2, 3)) + age[:, 0] > 0).long()
    items = [({"image": image[i], "age": age[i]}, int(y[i])) for i in range(120)]
    return qg.Task(TwoInputs(), functional.cross_entropy, items_of(items))


def items_of(items):
    """A Dataset of these items."""
    class Items(Dataset):
        def __len__(self):
            return len(items)

        def __getitem__(self, index):
            return items[index]

    return Items()


def several_outputs():
    x = drawn(160, 6)
    target = torch.stack([x[:, :3].argmax(dim=1).float(), x.sum(dim=1)], dim=1)
    return qg.Task(TwoOutputs(), both_losses, (x, target), metrics={"kind": kind_is_right})


KINDS = {
    "classification": classification, "regression": regression, "huber": huber, "multi-label": multi_label,
    "segmentation": segmentation, "next token": next_token, "several inputs": several_inputs,
    "several outputs": several_outputs,
}
