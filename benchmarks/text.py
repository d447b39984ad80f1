"""Measure tokens per second of n stacked transformers in the whole training loop against a plain loop, in one run.

    python benchmarks/text.py                           # on a GPU: DistilBERT, n = 16, batch 32, 128 tokens, bf16
    python benchmarks/text.py --no-compile              # as in short trainings
    python benchmarks/text.py --train lora:8            # or head: nodes share the frozen base
    python benchmarks/text.py --cpu                     # a tiny model of the same architecture, to test the script

The model is a DistilBERT with random weights, on random texts of full length: nothing is downloaded. Dropout is on,
as in its configuration. The plain loop does the same work: for each model forward, backward and torch.optim.Adam, then
the average with the neighbours. Evaluation is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from simulator import device_of
from torch import nn

from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.runs.building import make_task
from quasiglobal.training import program as programs
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

CLASSES = 4
TOY = {"dim": 64, "hidden_dim": 256, "n_layers": 2, "n_heads": 4, "vocab_size": 500}
"""Size of the DistilBERT for --cpu."""

Timed = Callable[[], float]
"""Run one epoch and return tokens per second."""


def random_texts(examples: int, length: int, vocabulary: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, vocabulary, (examples, length), dtype=torch.int32, generator=generator)
    y = torch.randint(0, CLASSES, (examples,), generator=generator)
    train, test = Examples(x, y), Examples(x[:64], y[:64])
    return Dataset("random", train, test, tuple(map(str, range(CLASSES))), 1.0, (), (), "none", pad=0)


def ours(task: Task, experiment: Experiment, device: torch.device, compiles: bool, recomputing: bool) -> Timed:
    if not compiles:
        programs.WORTH_COMPILING = math.inf
    program = programs.Program(task, [experiment], device, recomputing=recomputing)
    length = task.data.shape[0]
    return lambda: program.train_epoch()[0]["images_per_second"] * length


def plain_loop(task: Task, experiment: Experiment, device: torch.device) -> Timed:
    """The usual implementation: a list of models with transformers' own attention, a list of optimizers."""
    program = programs.Program(task, [experiment], device)     # used only for its data
    feed, graph = program.feed, program.engine.topology
    n, steps = graph.n, feed.steps_per_epoch
    models = [task.module(0).to(device).train() for _ in range(n)]
    for model in models:
        model.model.set_attn_implementation("sdpa")
    trained = [[parameter for parameter in model.parameters() if parameter.requires_grad] for model in models]
    optimizers = [torch.optim.Adam(own, lr=1e-5, betas=(0.9, 0.99), weight_decay=1e-4) for own in trained]
    W = torch.tensor(graph.weights(), dtype=torch.float32, device=device)
    index, bf16 = feed.plan.epoch(0, device).index, experiment.precision == "bf16"
    inputs, targets, length = feed.inputs, feed.targets, task.data.shape[0]
    del program, feed

    def step(at: int) -> None:
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                output = model(inputs.show(index[at, i]))
            nn.functional.cross_entropy(output.float(), targets[index[at, i]]).backward()
            optimizer.step()
        with torch.no_grad():
            for parameters in zip(*trained, strict=True):
                mixed = (W @ torch.stack(parameters).flatten(1)).view(n, *parameters[0].shape)
                for parameter, value in zip(parameters, mixed, strict=True):
                    parameter.copy_(value)

    def timed() -> float:
        _wait(device)
        began = time.perf_counter()
        for at in range(steps):
            step(at)
        _wait(device)
        return steps * n * experiment.batch * length / (time.perf_counter() - began)

    return timed


def measured(name: str, make: Callable[[], Timed], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median of tokens per second and the peak memory in GiB; the route is freed afterwards."""
    timed = make()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    timed()
    first = time.perf_counter() - began
    rates = [timed() for _ in range(repeats)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    print(
        f"    {name}: {statistics.median(rates):,.0f} tokens/s (from {min(rates):,.0f} to {max(rates):,.0f}), "
        f"{memory:.1f} GiB peak memory, first epoch {first:.1f} s", flush=True,
    )
    return statistics.median(rates), memory


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="steps per epoch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--algorithm", default="qg-dadam")
    parser.add_argument("--train", default="all", help="all, head or lora:RANK")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the stacked program")
    parser.add_argument("--recompute", action="store_true", help="use activation checkpointing in ours")
    parser.add_argument("--out", help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    args = parser.parse_args()
    if args.tiny:
        args.cpu, args.nodes, args.repeats = True, 3, 1
    if args.cpu:
        args.nodes, args.batch, args.length, args.steps = min(args.nodes, 4), 8, 32, 5
    device = device_of(args.cpu)
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "distilbert", "vocab_size": 30_522, "pad_token_id": 0} | (TOY if args.cpu else {})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        experiment = Experiment(
            data="random", model=f"hf:{folder}", pretrained=False, train=args.train, topology=f"ring:{args.nodes}",
            algorithm=args.algorithm, partition="iid", batch=args.batch, steps=args.steps, lr=1e-5, warmup=0.0,
            milestones=(), epochs=10_000, precision="fp32" if args.cpu else "bf16",
        )
        task = make_task(experiment, random_texts(args.nodes * args.batch * 4, args.length, config["vocab_size"]))
        size = sum(parameter.numel() for parameter in task.module(0).parameters())
        print(
            f"{args.nodes} × {size / 1e6:.1f} M parameters, train {args.train}, batch {args.batch}, {args.length} "
            f"tokens, {experiment.precision}, {args.algorithm} on ring:{args.nodes}, {device.type}", flush=True,
        )
        routes: dict[str, Callable[[], Timed]] = {
            "ours": lambda: ours(task, experiment, device, not args.no_compile, args.recompute),
            "plain loop": lambda: plain_loop(task, experiment, device),
        }
        found = {name: measured(name, make, device, args.repeats) for name, make in routes.items()}
    ratio = found["ours"][0] / found["plain loop"][0]
    print(f"    {ratio:.2f} times the plain loop", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"settings": vars(args), "found": found, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main()
