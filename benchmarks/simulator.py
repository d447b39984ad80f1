"""Images per second in the whole training loop, against a plain Python loop over n models, in one run.

    python benchmarks/simulator.py                     # on a GPU: ResNet-20, n = 16, batch 32, bf16
    python benchmarks/simulator.py --cpu               # on a CPU: the small models, and ResNet-20 at n = 4

Evaluation is not counted. The plain loop does the same work: augmentation, forward, backward, torch.optim.SGD with
Nesterov momentum for each model, then the average with the neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from quasiglobal.experiment import Experiment
from quasiglobal.tasks.datasets import Dataset, Examples
from quasiglobal.tasks.models import build
from quasiglobal.training import Task, Training


def random_data(shape: tuple[int, int, int], examples: int, augmentation: str) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (examples,), generator=generator)
    channels = shape[0]
    return Dataset(
        name="random", train=Examples(x, y, {}), test=Examples(x[:100], y[:100], {}), classes=tuple("0123456789"),
        scale=255.0, mean=(0.5,) * channels, std=(0.25,) * channels, augmentation=augmentation,
    )


def ours(task: Task, experiment: Experiment, seeds: int, device: torch.device, repeats: int) -> list[float]:
    training = Training(task, experiment, range(seeds), device)
    began = time.perf_counter()
    training.train_epoch()
    print(f"    first epoch, with compilation: {time.perf_counter() - began:.1f} s", flush=True)
    rates = []
    for _ in range(repeats):
        rates.append(training.train_epoch()[0]["images_per_second"])
    return rates


def plain_loop(task: Task, experiment: Experiment, device: torch.device, steps: int, repeats: int) -> list[float]:
    """What people write: a list of models, a list of optimizers."""
    training = Training(task, experiment, [0], device)      # for its data and weights alone
    n = training.graph.n
    models = [task.module(0).to(device) for _ in range(n)]
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizers = [torch.optim.SGD(model.parameters(), **options) for model in models]
    W = torch.tensor(training.graph.weights(), dtype=torch.float32, device=device)
    training._load(training.plan.epoch(0, device))
    static, bf16 = training._static, experiment.precision == "bf16"

    def step(at: int) -> None:
        names = ("index", "flip", "shift") if training.plan.augment else ("index",)
        index, *moves = (static[name][at % len(static["index"])] for name in names)
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = training.images.show(index[i], *(move[i] for move in moves))
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                output = model(x)
            nn.functional.cross_entropy(output.float(), training.targets[index[i]]).backward()
            optimizer.step()
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mixed = torch.einsum("ij,j...->i...", W, torch.stack(parameters))
                for parameter, value in zip(parameters, mixed, strict=True):
                    parameter.copy_(value)

    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for at in range(steps):
            step(at)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return steps * n * experiment.batch / (time.perf_counter() - began)

    timed()
    return [timed() for _ in range(repeats)]


def compare(name: str, norm: str | None, shape: tuple[int, int, int], nodes: int, args: argparse.Namespace) -> dict:
    device = torch.device("cpu" if args.cpu else "cuda")
    experiment = Experiment(
        model=name, norm=norm, topology=f"ring:{nodes}", partition="iid", algorithm="qg-dsgdm-n", batch=32,
        epochs=1000, lr=0.1, precision="fp32" if args.cpu else "bf16",
    )
    per_node = args.steps * experiment.batch
    data = random_data(shape, nodes * per_node, "flip-crop" if shape[0] == 3 else "none")
    task = Task(lambda: build(name, norm=norm, shape=shape), nn.functional.cross_entropy, data)
    print(f"{name} {norm or ''} {shape}, n = {nodes}", flush=True)
    result = {"model": name, "norm": norm, "nodes": nodes, "seeds": args.seeds}
    rates = ours(task, experiment, args.seeds, device, args.repeats)
    result["ours"] = statistics.median(rates)
    print(f"    ours: {result['ours']:,.0f} images/s (from {min(rates):,.0f} to {max(rates):,.0f})", flush=True)
    if not args.no_loop:
        rates = plain_loop(task, experiment, device, max(1, args.steps // (1 if args.cpu else 8)), args.repeats)
        result["plain_loop"] = statistics.median(rates)
        result["ratio"] = result["ours"] / result["plain_loop"]
        print(f"    plain loop: {result['plain_loop']:,.0f} images/s; ratio {result['ratio']:.1f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=64, help="steps an epoch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--norms", nargs="*", default=["evonorm", "gn", "bn", "evonorm-released"])
    parser.add_argument("--out", help="write the results as JSON")
    args = parser.parse_args()
    if args.cpu:
        cases = [("mlp", None, (1, 8, 8), 16), ("cnn", "none", (1, 8, 8), 16), ("resnet20", "gn", (3, 32, 32), 4)]
    else:
        cases = [("resnet20", norm, (3, 32, 32), 16) for norm in args.norms]
    results = []
    for case in cases:
        results.append(compare(*case, args))
        if args.out:
            with open(args.out, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
