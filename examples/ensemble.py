"""Train an ensemble of 16 networks as one program, then use each of them: no nodes, no graph."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from quasiglobal.stacked import Stack, compiled

K, BATCH = 16, 32

digits = load_digits()
torch.manual_seed(0)
order = torch.randperm(len(digits.target))
images, labels = torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]
images, labels, tests, answers = images[:300], labels[:300], images[300:], labels[300:]


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def momentum(x, g, m):
    """New values of all arguments; g stays as it is."""
    m = 0.9 * m + g
    return x - 0.02 * m, g, m


stack = Stack(network, nn.functional.cross_entropy)
x, buffers = stack.start(seeds=range(K))                    # x is [16, parameters]
m = torch.zeros_like(x)
step = compiled(momentum, like=(x, x, m))                   # works in place

for _ in range(200):
    chosen = torch.randint(0, len(images), (K, BATCH))      # each network draws its own sample
    found = stack.gradients(x, buffers, images[chosen], labels[chosen])
    step(x, found.g, m)
    buffers = found.buffers

outputs = stack.outputs(x, buffers, tests[None])[:, 0]      # [16, examples, 10]
each = (outputs.argmax(dim=2) == answers).float().mean(dim=1)
together = (outputs.softmax(dim=2).mean(dim=0).argmax(dim=1) == answers).float().mean()
print(f"a network is right in {each.mean():.2f} of the tests, the ensemble in {together:.2f}")

best = stack.model(x, buffers, int(each.argmax()))          # the parameters of one, in a plain module
print(best)
