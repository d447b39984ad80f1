"""Train your CNN on your image files, at six nodes with different shares of the shapes, and use the result."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset

import quasiglobal as qg

SHAPES = ("circle", "square", "triangle")


def draw(shape, rng):
    """One grey image of 16 × 16 pixels; yours are files already."""
    image = Image.fromarray(rng.integers(0, 90, (16, 16), dtype=np.uint8))
    x, y, r = *rng.integers(5, 11, 2), rng.integers(3, 5)
    corners = {"circle": None, "square": [(-r, -r), (r, -r), (r, r), (-r, r)], "triangle": [(0, -r), (r, r), (-r, r)]}
    points = [(x + dx, y + dy) for dx, dy in corners[shape] or ()]
    pen = ImageDraw.Draw(image)
    pen.polygon(points, fill=200) if points else pen.ellipse((x - r, y - r, x + r, y + r), fill=200)
    return image


rng = np.random.default_rng(0)
for number in range(600):
    path = Path("images", shape := SHAPES[number % 3], f"{number:03}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(shape, rng).save(path)


class Images(Dataset):
    """Image files in one folder per class."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.png"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        pixels = torch.from_numpy(np.array(Image.open(self.files[index]))) / 255
        return pixels[None], SHAPES.index(self.files[index].parent.name)


torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(128, 3),
)
task = qg.Task(net, nn.functional.cross_entropy, Images("images"))
run = qg.train(task, algorithm="qg-dsgdm-n", topology="ring:6", epochs=25, lr=0.1, batch=16, alpha=1.0)
last = run.records[-1]
print(f"accuracy {last['accuracy']:.2f}, of the worst node {last['accuracy_worst']:.2f}")

model = run.average()                                       # a plain nn.Module
pixels, _ = Images("images")[599]
print("images/triangle/599.png is a", SHAPES[int(model(pixels[None]).argmax())])
