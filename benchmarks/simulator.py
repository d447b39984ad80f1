"""Measure images per second of the whole training loop against the usual implementations, in one run.

    python benchmarks/simulator.py                     # on a GPU: ResNet-20, n = 16, batch 32, bf16, and more
    python benchmarks/simulator.py --cpu               # on a CPU: the small models, and ResNet-20 at n = 4

Evaluation is not counted. The plain loop over n models does the same work: augmentation, forward, backward, sums of
losses and correct predictions, torch.optim.SGD with Nesterov momentum for each model, then the average with the
neighbours. The centralized reference is one compiled model on the global batch, each step a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.engines.capture import Captured
from quasiglobal.models import build
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task


def random_data(shape: tuple[int, int, int], examples: int, augmentation: str) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (examples,), generator=generator)
    channels = shape[0]
    return Dataset(
        name="random", train=Examples(x, y, {}), test=Examples(x[:100], y[:100], {}), classes=tuple("0123456789"),
        scale=255.0, mean=(0.5,) * channels, std=(0.25,) * channels, augmentation=augmentation,
    )


WARM_UP = 4.0
"""Seconds of warm-up before a route is timed: the first steps on a CPU still map memory."""

Timed = Callable[[], float]
"""Run some steps and return images per second."""


def ours(task: Task, experiment: Experiment, seeds: int, device: torch.device) -> Timed:
    program = Program(task, [experiment.with_seed(seed) for seed in range(seeds)], device)
    return lambda: program.train_epoch()[0]["images_per_second"]


def plain_loop(task: Task, experiment: Experiment, device: torch.device, steps: int) -> Timed:
    """The usual implementation: a list of models, a list of optimizers."""
    program = Program(task, [experiment], device)       # used only for its data and weights
    feed, graph = program.feed, program.engine.topology
    n = graph.n
    models = [task.module(0).to(device) for _ in range(n)]
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizers = [torch.optim.SGD(model.parameters(), **options) for model in models]
    W = torch.tensor(graph.weights(), dtype=torch.float32, device=device)
    drawn, bf16 = feed.plan.epoch(0, device), experiment.precision == "bf16"
    total, right = (torch.zeros(n, device=device) for _ in range(2))

    def step(at: int) -> None:
        index, *moves = (values[at % len(drawn.index)] for values in (drawn.index, *drawn.moves))
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x = feed.inputs.show(index[i], *(move[i] for move in moves))
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                output = model(x)
            loss = nn.functional.cross_entropy(output.float(), feed.targets[index[i]])
            loss.backward()
            optimizer.step()
            total[i] += loss.detach()
            right[i] += (output.detach().argmax(dim=-1) == feed.targets[index[i]]).sum()
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

    return timed


def centralized(task: Task, experiment: Experiment, device: torch.device, steps: int) -> Timed:
    """One compiled model on the global batch; its step is captured as ours is."""
    program = Program(task, [experiment], device)       # used only for its data
    feed, n = program.feed, program.engine.topology.n
    model = task.module(0).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=torch.tensor(0.1), momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    feed.load(0)
    drawn, at = feed.plan.epoch(0, device), feed.counter
    total, right = (torch.zeros((), device=device) for _ in range(2))

    @torch.compile(dynamic=False)
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=experiment.precision == "bf16"):
            output = model(x)
        return nn.functional.cross_entropy(output.float(), y), (output.argmax(dim=-1) == y).sum()

    def step() -> None:
        values = (drawn.index, *drawn.moves)
        index, *moves = (one.index_select(0, at)[0].flatten(0, 1) for one in values)
        optimizer.zero_grad(set_to_none=True)
        loss, answers = loss_of(feed.inputs.show(index, *moves), feed.targets[index])
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())
        right.add_(answers)
        at.add_(1)

    captured = Captured(lambda: [at])

    def timed() -> float:
        at.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            captured(0, step)
        torch.cuda.synchronize()
        return steps * n * experiment.batch / (time.perf_counter() - began)

    return timed


class OwnNetwork(nn.Module):
    """An example of a user's own network, unknown to the package."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 5, padding=2)
        self.norm = nn.GroupNorm(8, 32)
        self.depth = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.point = nn.Conv2d(32, 64, 1)
        self.wide = nn.Conv2d(64, 64, 3, stride=2, padding=1)
        self.batch = nn.BatchNorm2d(64)
        self.last = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(64 * 16, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(nn.functional.relu(self.norm(self.stem(x))), 2)
        x = nn.functional.silu(self.point(self.depth(x)))
        x = nn.functional.relu(self.batch(self.wide(x)), inplace=True)
        x = nn.functional.avg_pool2d(x + torch.tanh(self.last(x)), 2)
        return self.head(x.flatten(1))


@dataclass(frozen=True)
class Case:
    model: str
    norm: str | None = None
    nodes: int = 16
    seeds: int = 1
    width: float = 1.0
    shape: tuple[int, int, int] = (3, 32, 32)
    references: tuple[str, ...] = ()
    steps: int = 64
    """Steps per epoch."""

    def module(self) -> nn.Module:
        if self.model == "own":
            return OwnNetwork()
        return build(self.model, norm=self.norm, shape=self.shape, width=self.width)


ON_A_CPU = [
    Case("mlp", shape=(1, 8, 8), references=("plain_loop",)),
    Case("cnn", "none", shape=(1, 8, 8), references=("plain_loop",)),
    Case("resnet20", "gn", nodes=4, references=("plain_loop",)),
]
ON_A_GPU = [
    Case("resnet20", "evonorm", references=("plain_loop", "centralized")),
    Case("resnet20", "gn"),
    Case("resnet20", "bn"),
    Case("resnet20", "evonorm-released"),
    Case("resnet20", "evonorm", seeds=3),
    Case("resnet20", "evonorm", nodes=1024, steps=8),
    Case("vgg11", width=0.5, references=("centralized",)),
    Case("own", references=("plain_loop",)),
]


def compare(case: Case, device: torch.device, repeats: int) -> dict[str, object]:
    experiment = Experiment(
        model="resnet20" if case.model == "own" else case.model, norm=case.norm, topology=f"ring:{case.nodes}",
        partition="iid", algorithm="qg-dsgdm-n", batch=32, epochs=1000, lr=0.1,
        precision="fp32" if device.type == "cpu" else "bf16",
    )
    data = random_data(case.shape, case.nodes * case.steps * 32, "flip-crop" if case.shape[0] == 3 else "none")
    task = Task(case.module, nn.functional.cross_entropy, data)
    print(f"{case.model} {case.norm or ''} {case.shape}, n = {case.nodes}, {case.seeds} seeds", flush=True)
    routes = {"ours": ours(task, experiment, case.seeds, device)}
    for name in case.references:
        steps = case.steps // 8 if (name, device.type) == ("plain_loop", "cuda") else case.steps
        routes[name] = REFERENCES[name](task, experiment, device, steps)
    for route, timed in routes.items():
        began = time.perf_counter()
        timed()
        print(f"    {route}: first steps, with compilation, {time.perf_counter() - began:.1f} s", flush=True)
        while time.perf_counter() - began < WARM_UP:
            timed()
    rates: dict[str, list[float]] = {route: [] for route in routes}
    for _ in range(repeats):                        # alternate, so that a busy machine slows all routes alike
        for route, timed in routes.items():
            rates[route].append(timed())
    result: dict[str, object] = asdict(case)
    for route, values in rates.items():
        result[route] = statistics.median(values)
        print(f"    {route}: {result[route]:,.0f} images/s (from {min(values):,.0f} to {max(values):,.0f})", flush=True)
    for name in case.references:
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates[name], strict=True))
        result[f"over_{name}"] = ratio
        print(f"    {ratio:.2f} times {name}", flush=True)
    return result


REFERENCES = {"plain_loop": plain_loop, "centralized": centralized}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="write the results as JSON")
    args = parser.parse_args()
    results = []
    for case in ON_A_CPU if args.cpu else ON_A_GPU:
        results.append(compare(case, torch.device("cpu" if args.cpu else "cuda"), args.repeats))
        if args.out:
            with open(args.out, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
