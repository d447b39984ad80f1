"""Write the scans of four made-up hospitals and the file they agreed on, for examples/four_hospitals.sh.

Each hospital has images of 12 × 12 pixels in folders benign and malignant, mostly of one kind: a malignant spot is
larger and has an uneven border. They stand for real scans and teach nothing about medicine.
"""

from pathlib import Path

import numpy as np
from PIL import Image

AGREED = """\
model = "cnn"
algorithm = "qg-dsgdm-n"
topology = "ring:4"
epochs = 12
steps = 8                       # per epoch, however many images a hospital has
lr = 0.05
warmup = 0
classes = ["benign", "malignant"]
shape = [1, 12, 12]
mean = [0.35]                   # all hospitals normalise pixels alike
std = [0.25]
"""


def scan(kind, rng):
    """One image: a spot on noise."""
    y, x = np.mgrid[:12, :12] - rng.uniform(5, 6, (2, 1, 1))
    radius = rng.uniform(2, 4)
    if kind == "malignant":
        radius = (1 + radius / 2) * (1.5 + 0.5 * np.sin(5 * np.arctan2(y, x)))
    pixels = 60 + 60 * (np.hypot(x, y) < radius) + rng.normal(0, 30, (12, 12))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


for hospital, malignant in enumerate((0.1, 0.3, 0.7, 0.9)):
    rng = np.random.default_rng(hospital)
    for split, count in (("train", 120), ("test", 60)):
        for number in range(count):
            share = malignant if split == "train" else 0.5
            kind = "malignant" if rng.random() < share else "benign"
            path = Path(f"hospital-{hospital}", split, kind, f"{number:03}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            scan(kind, rng).save(path)
Path("experiment.toml").write_text(AGREED)
