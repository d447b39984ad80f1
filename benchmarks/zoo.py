"""Measure images per second of networks as users write them, against the usual implementations, in one run.

    python benchmarks/zoo.py                           # on a GPU: n = 16, batch 32, bf16
    python benchmarks/zoo.py --cpu                     # on a CPU: narrow networks, n = 4, batch 8, fp32
    python benchmarks/zoo.py --only convnext vit       # some networks

On a GPU, one process per network first fills the caches of compiled kernels, all at once: most of the time is spent in
compilers, which use one core each. Then this process measures one network after the other.

The networks are those of `tests/unit/zoo.py`, wider, on random 3 × 32 × 32 images. The references are those of
`benchmarks/simulator.py`: a loop over n models, and, on a GPU, one compiled model on the global batch.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from simulator import Timed, centralized, device_of, measured, ours, plain_loop, random_data, write_rows
from torch import Tensor, nn

from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from zoo_attention import HandmadeViT, Mixer
from zoo_classifiers import ConvNeXt, DenseNet, EfficientNet, MobileNetV2, ResNeXt
from zoo_images import OddKernels, UNet
from zoo_sequences import GRU


class RowByRow(nn.Module):
    """A recurrent network that reads an image's rows of pixels as a series."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gru = GRU(3 * 32, width, classes=10)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.transpose(1, 2).flatten(2))


BLOCKS = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1))
"""Width and stride of the blocks of MobileNet and EfficientNet."""


@dataclass(frozen=True)
class Network:
    module: Callable[..., nn.Module]
    sizes: dict[str, Any]
    """On a GPU."""
    small: dict[str, Any] = field(default_factory=dict)
    """On a CPU."""
    pixels: bool = False
    """Whether each pixel has a label."""


NETWORKS = {
    "convnext": Network(ConvNeXt, {"widths": (32, 64, 128), "depths": (1, 1, 2)}),
    "densenet": Network(DenseNet, {"growth": 12, "depths": (3, 3, 3)}),
    "mobilenet": Network(MobileNetV2, {"width": 16, "blocks": BLOCKS, "expansion": 4}),
    "efficientnet": Network(EfficientNet, {"width": 16, "blocks": BLOCKS, "expansion": 4}),
    "odd-kernels": Network(OddKernels, {"width": 32}),
    "unet": Network(UNet, {"width": 16, "classes": 10}, {"classes": 10}, pixels=True),
    "resnext": Network(ResNeXt, {"width": 64, "groups": 8, "strides": (1, 2, 2)}),
    "vit": Network(HandmadeViT, {"width": 96, "heads": 3, "depth": 4, "side": 32}, {"side": 32}),
    "mixer": Network(Mixer, {"width": 96, "depth": 4, "side": 32}, {"side": 32}),
    "gru": Network(RowByRow, {"width": 128}),
}


def labelled_pixels(examples: int) -> Dataset:
    """Random images with a class of each pixel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (examples, 32, 32), generator=generator)
    return Dataset("random", Examples(x, y), Examples(x[:100], y[:100]), classes=(), own=True)


SIZES = {"gpu": (16, 32, 32), "cpu": (4, 8, 16), "tiny": (3, 2, 2)}
"""Nodes, batch, and steps per epoch."""


def routes_of(network: Network, device: torch.device, kind: str) -> tuple[int, dict[str, Timed]]:
    """The number of parameters, and the implementations to measure."""
    on_gpu = device.type == "cuda"
    nodes, batch, steps = SIZES[kind]
    examples = nodes * batch * steps
    data = labelled_pixels(examples) if network.pixels else random_data((3, 32, 32), examples, "flip-crop")
    module = partial(network.module, **(network.sizes if on_gpu else network.small))
    task = Task(module, nn.functional.cross_entropy, data)
    experiment = Experiment(
        model="resnet20", topology=f"ring:{nodes}", partition="iid", algorithm="qg-dsgdm-n", batch=batch, epochs=1000,
        lr=0.01, precision="bf16" if on_gpu else "fp32",
    )
    size = sum(parameter.numel() for parameter in task.module(0).parameters())
    print(f"{network.module.__name__}, {size:,} parameters, n = {nodes}, batch {batch}", flush=True)
    routes = {
        "ours": ours(task, experiment, 1, device),
        "plain_loop": plain_loop(task, experiment, device, 2 if on_gpu else steps),
    }
    if on_gpu:
        routes["centralized"] = centralized(task, experiment, device, steps)
    return size, routes


def compare(network: Network, device: torch.device, repeats: int, kind: str) -> dict[str, object]:
    size, routes = routes_of(network, device, kind)
    found = {"parameters": size} | measured(routes, repeats, {"gpu": 0.5, "cpu": 1.0, "tiny": 0.0}[kind])
    routes.clear()
    gc.collect()                                        # the graphs and models of this network
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def fill_caches(names: Iterable[str], limit: float) -> None:
    """Compile the networks in one process each; `limit` is in seconds. What is missing is compiled later."""
    began = time.perf_counter()
    where = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    filling = {
        name: subprocess.Popen([sys.executable, __file__, "--fill", name], env=where, stdout=subprocess.DEVNULL)
        for name in names
    }
    for name, process in filling.items():
        try:
            failed = process.wait(max(0.0, began + limit - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            failed = process.wait()
        said = "stopped" if failed else "compiled"
        print(f"{name}: {said} after {time.perf_counter() - began:.0f} s", flush=True)


def fill(network: Network, device: torch.device) -> None:
    """Run the first steps of the compiled implementations."""
    _, routes = routes_of(network, device, "gpu")
    routes["ours"]()
    routes["centralized"]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NETWORK", help=f"some of {', '.join(NETWORKS)}")
    parser.add_argument("--out", help="write the results as JSON, after each network")
    parser.add_argument("--fill-seconds", type=float, default=90, help="limit of filling the caches; 0 to leave it out")
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    args = parser.parse_args()
    if args.tiny:
        args.cpu, args.repeats, args.only = True, 1, args.only or ["gru", "unet"]
    device = device_of(args.cpu)
    if args.fill:
        fill(NETWORKS[args.fill], device)
        return
    kind = "tiny" if args.tiny else "cpu" if args.cpu else "gpu"
    rows = {name: partial(compare, network, device, args.repeats, kind) for name, network in NETWORKS.items()}
    if not args.cpu and args.fill_seconds:
        fill_caches([name for name in NETWORKS if name in (args.only or NETWORKS)], args.fill_seconds)
    write_rows(rows, args.only, args.out)


if __name__ == "__main__":
    main()
