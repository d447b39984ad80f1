"""A curious neighbour: training images that it sees, although the other site sends only models.

It needs two things that every site has anyway: the model at the start, which is the same for all, and the first
message of its neighbour. Their difference is proportional to the gradient of the neighbour's first batch. In a linear
first layer, unit r has the gradient Σ δ_i x_i, and its bias Σ δ_i: sums over the images x_i of the batch. If a single
image activates the unit, the quotient is this image; otherwise it is a mixture of some.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import quasiglobal as qg
from quasiglobal.algorithms.base import NodeView, Wrapper


def scans(count, seed):
    """Made-up images of 12 × 12 pixels, a spot on noise, and their labels."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:12, :12][:, None] - rng.uniform(3, 9, (2, count, 1, 1))
    spot = np.hypot(x, y) < rng.uniform(2, 4, (count, 1, 1))
    pixels = 60 + 120 * spot + rng.normal(0, 30, spot.shape)
    return pixels.clip(0, 255).astype(np.uint8)[:, None], rng.integers(0, 2, count)


def images_in(start, message, units, pixels=144):
    """The images in a message: what moved the first layer's weights, over what moved its biases."""
    moved = start - message
    weight, bias = moved[: units * pixels].view(units, pixels), moved[units * pixels :][:units, None]
    return weight[bias[:, 0] != 0] / bias[bias[:, 0] != 0]


def likeness(images, seen):
    """For each true image, the highest correlation with one that the neighbour sees; highest first."""
    images = torch.from_numpy(images).flatten(1)
    together = torch.corrcoef(torch.cat([images, seen]))[: len(images), len(images) :]
    return together.max(dim=1).values.sort(descending=True).values


HEARD = []


class Ear(NodeView):
    """What neighbours receive from the nodes."""

    def mix(self, message):
        HEARD.append(message.clone())
        return self.node.mix(message)


@dataclass(frozen=True, kw_only=True)
class Overheard(Wrapper):
    """The algorithm `base`, whose first message is kept."""

    def step(self, x, g, state, node):
        HEARD.append(x.clone())
        return self.base.step(x, g, state, Ear(node))


if __name__ == "__main__":
    for batch in (4, 8, 32):
        torch.manual_seed(2)
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(144, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 2)
        )
        sites = [qg.data.from_arrays(*scans(batch, site), *scans(10, 9), normalise=True) for site in (0, 1)]
        task = qg.Task(net, nn.functional.cross_entropy, sites)
        HEARD.clear()
        qg.train(task, Overheard(base=qg.algorithm("qg-dsgdm-n")), "complete:2", epochs=1, batch=batch, lr=0.1)
        start, message = HEARD[:2]
        best = likeness(scans(batch, 0)[0], images_in(start[0], message[0], 512))
        values = " ".join(f"{value:.3f}" for value in best[:8])
        print(f"batch {batch:<2}  {int((best > 0.99).sum())} images recovered; highest correlations {values}")
