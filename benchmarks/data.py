"""Measure images per second delivered to the device, from memory and from shards on disk, in one run.

    python benchmarks/data.py                          # on a GPU: 256 × 256 images; then ResNet-18 on both
    python benchmarks/data.py --cpu                    # on a CPU: delivery alone

A delivered image is read, copied to the device, cropped, mirrored and normalised. "disk" reads the file from its start
to its end after its pages were dropped from the page cache: a bound for data that exceed the memory. With `--cold` the
pages are dropped before each epoch too. Every setting is measured three times in turn; the median is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.data.shards import Shards
from quasiglobal.models import build
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task


def made(folder: Path, images: int, side: int) -> Dataset:
    """Random images in shards, with a small test set."""
    rng = np.random.default_rng(0)
    shards = Shards(folder / "train", (images, 3, side, side))
    shards.make(lambda row: rng.integers(0, 256, size=(3, side, side), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, 10, size=images))
    train = Examples(shards.x, y, shards=shards)
    test = Examples(shards.x[:64].clone(), y[:64])
    return Dataset("made", train, test, tuple("0123456789"), 255.0, (0.5,) * 3, (0.25,) * 3, "resize-crop")


def drop_pages(path: Path) -> None:
    """Drop the file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(path: Path, image: int) -> float:
    """Images per second when the file is read once, in order."""
    drop_pages(path)
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.read(2**26):
            pass
    return path.stat().st_size / image / (time.perf_counter() - began)


def delivery(program: Program) -> Callable[[], float]:
    """Images per second delivered in an epoch, without any training."""
    def run() -> float:
        began = time.perf_counter()
        program.begin_epoch()
        for step in range(program.feed.steps_per_epoch):
            program.feed.read(step)
            program.feed.batch(*program.feed.shapes[step])
            program.feed.advance()
        if program.device.type == "cuda":
            torch.cuda.synchronize()
        return program.feed.examples * program.bands.rows / (time.perf_counter() - began)

    return run


def training(program: Program) -> Callable[[], float]:
    """Images per second of a training epoch."""
    return lambda: program.train_epoch()[0]["images_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cold", action="store_true", help="drop the pages of the shards before each epoch")
    parser.add_argument("--images", type=int, default=16_384)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.cpu, chosen.images, chosen.side, chosen.nodes, chosen.batch = True, 24, 8, 3, 4
    device = torch.device("cpu" if chosen.cpu or not torch.cuda.is_available() else "cuda")
    with tempfile.TemporaryDirectory() as folder:
        streamed = made(Path(folder), chosen.images, chosen.side)
        kept = replace(streamed, train=Examples(streamed.train.x.clone(), streamed.train.y))
        one = Experiment(
            data="made", model="resnet18", norm="evonorm", topology=f"ring:{chosen.nodes}", batch=chosen.batch,
            partition="iid", epochs=1000, precision="fp32" if chosen.cpu else "bf16", lr=0.1, warmup=0.0,
        )
        file, image = Path(folder) / "train" / "images", 3 * chosen.side**2
        print(json.dumps({"device": str(device), "images": chosen.images, "GB": chosen.images * image / 1e9}))
        kinds = {"delivered": delivery} | ({} if chosen.cpu else {"ResNet-18": training})
        for what, kind in kinds.items():
            routes: dict[str, Callable[[], float]] = {}
            for name, data in (("memory", kept), ("shards", streamed)):
                model = build("resnet18", norm="evonorm", width=1.0, classes=10, shape=data.shape)
                program = Program(Task(model, torch.nn.functional.cross_entropy, data), [one], device)
                routes[name] = kind(program)
                routes[name]()                              # compiles, captures, and verifies the checksums
            found: dict[str, list[float]] = {name: [] for name in routes}
            for _ in range(3):
                for name, run in routes.items():
                    if chosen.cold:
                        drop_pages(file)
                    found[name].append(run())
            rates = {name: statistics.median(values) for name, values in found.items()}
            print(json.dumps({"what": what} | {name: round(rate) for name, rate in rates.items()} | {
                "shards / memory": round(rates["shards"] / rates["memory"], 3),
            }), flush=True)
        print(json.dumps({"what": "disk, in order", "images/s": round(disk(file, image))}))


if __name__ == "__main__":
    main()
