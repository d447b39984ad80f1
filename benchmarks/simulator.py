"""Measure images per second of the whole training loop against the usual implementations, in one run.

    python benchmarks/simulator.py                     # on a GPU: ResNet-20, n = 16, batch 32, bf16, and more
    python benchmarks/simulator.py --cpu               # on a CPU: the small models, and ResNet-20 at n = 4
    python benchmarks/simulator.py --only resnet18-224 evaluation      # some rows
    python benchmarks/simulator.py --before ../old     # this checkout and an older one, in turn

Evaluation is not counted, except in the row of that name. The plain loop over n models does the same work:
augmentation, forward, backward, sums of losses and correct predictions, torch.optim.SGD with Nesterov momentum for each
model, then the average with the neighbours. The centralized reference is one compiled model on the global batch, each
step a CUDA graph. In fp32 no route uses TF32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.models import build
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task


def random_data(shape: tuple[int, int, int], examples: int, augmentation: str, tests: int = 100) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (examples,), generator=generator)
    channels = shape[0]
    return Dataset(
        name="random", train=Examples(x, y, {}), test=Examples(x[:tests], y[:tests], {}), classes=tuple("0123456789"),
        scale=255.0, mean=(0.5,) * channels, std=(0.25,) * channels, augmentation=augmentation,
    )


WARM_UP = 4.0
"""Seconds of warm-up before a route is timed: the first steps on a CPU still map memory."""

Scores = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(inputs, targets) → the loss and the number of correct predictions."""

Timed = Callable[[], float]
"""Run some steps and return images per second."""


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done the work."""
    wait = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def device_of(cpu: bool) -> torch.device:
    """The device to measure on; end with one sentence if there is no GPU."""
    if not cpu and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; measure on the CPU with --cpu, or test the script with --tiny")
    return torch.device("cpu" if cpu else "cuda")


def precisely(experiment: Experiment, device: torch.device) -> AbstractContextManager[None]:
    """Compute fp32 in float32, without TF32."""
    from quasiglobal.stacked.precision import full_precision  # an older checkout has it elsewhere

    return nullcontext() if experiment.precision == "bf16" else full_precision(device.type)


def scores_of(task: Task, model: nn.Module, experiment: Experiment) -> Scores:
    """The model's loss and number of correct predictions; 0 if the task has no predictions."""
    bf16, right = experiment.precision == "bf16", task.right

    def scores(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            output = model(x)
        loss = task.loss(output.float(), y)
        return loss, torch.zeros_like(loss) if right is None else right(output, y).sum().detach()

    return scores


def compiled(scores: Scores, device: torch.device) -> Scores:
    """Compile the function; on a CPU leave it as it is."""
    if device.type == "cpu":
        return scores
    torch._dynamo.reset()                               # recompiles a function a few times only, for any models
    return torch.compile(scores, dynamic=False)


def one_model(task: Task, device: torch.device) -> nn.Module:
    """The model in the layout that is fastest on the device."""
    model = task.module(0).to(device)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model


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
    scores = [scores_of(task, model, experiment) for model in models]
    W = torch.tensor(graph.weights(), dtype=torch.float32, device=device)
    drawn = feed.plan.epoch(0, device)
    total, right = (torch.zeros(n, device=device) for _ in range(2))

    def step(at: int) -> None:
        index, *moves = (values[at % len(drawn.index)] for values in (drawn.index, *drawn.moves))
        for i, optimizer in enumerate(optimizers):
            x = feed.inputs.show(index[i], *(move[i] for move in moves))
            optimizer.zero_grad(set_to_none=True)
            loss, answers = scores[i](x, feed.targets[index[i]])
            loss.backward()
            optimizer.step()
            total[i] += loss.detach()
            right[i] += answers
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mixed = torch.einsum("ij,j...->i...", W, torch.stack(parameters))
                for parameter, value in zip(parameters, mixed, strict=True):
                    parameter.copy_(value)

    def run() -> None:
        with precisely(experiment, device):
            for at in range(steps):
                step(at)

    return lambda: steps * n * experiment.batch / seconds_of(run, device)


def centralized(task: Task, experiment: Experiment, device: torch.device, steps: int) -> Timed:
    """One compiled model on the global batch; its step is captured as ours is."""
    from quasiglobal.stacked.capture import Captured  # an older checkout has it elsewhere

    program = Program(task, [experiment], device)       # used only for its data
    feed, n = program.feed, program.engine.topology.n
    model = one_model(task, device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=torch.tensor(0.1), momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    feed.load([0])
    drawn, at = feed.plan.epoch(0, device), feed.counter
    total, right = (torch.zeros((), device=device) for _ in range(2))
    scores = compiled(scores_of(task, model, experiment), device)

    def step() -> None:
        values = (drawn.index, *drawn.moves)
        index, *moves = (one.index_select(0, at)[0].flatten(0, 1) for one in values)
        optimizer.zero_grad(set_to_none=True)
        loss, answers = scores(feed.inputs.show(index, *moves), feed.targets[index])
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())
        right.add_(answers)
        at.add_(1)

    again = partial(Captured(), 0, step) if device.type == "cuda" else step

    def run() -> None:
        at.zero_()
        with precisely(experiment, device):
            for _ in range(steps):
                again()

    return lambda: steps * n * experiment.batch / seconds_of(run, device)


def tested(task: Task, experiment: Experiment, device: torch.device) -> Timed:
    """All models tested together, with loss, accuracy and the recall of each class."""
    program = Program(task, [experiment], device)
    x, buffers = program.state.x, program.state.buffers
    images = len(x) * len(task.data.test)
    return lambda: images / seconds_of(lambda: program.evaluation(x, buffers), device)


def forward(task: Task, experiment: Experiment, device: torch.device, batch: int) -> Timed:
    """The forward pass of one compiled model, with loss and accuracy, as often as there are nodes."""
    n, tests = Program(task, [experiment], device).engine.topology.n, len(task.data.test)
    model = one_model(task, device).eval()
    inputs, targets = inputs_of(task.data, task.data.test, device=device), task.data.test.y.to(device)
    scores = compiled(scores_of(task, model, experiment), device)
    batches = torch.arange(tests, device=device).split(batch)
    total, right = (torch.zeros((), device=device) for _ in range(2))

    def run() -> None:
        with torch.no_grad(), precisely(experiment, device):
            for index in batches * n:
                loss, answers = scores(inputs.show(index), targets[index])
                total.add_(loss)
                right.add_(answers)

    return lambda: n * tests / seconds_of(run, device)


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
    batch: int = 32
    precision: str = "bf16"
    references: tuple[str, ...] = ()
    steps: int = 64
    """Steps per epoch."""
    tests: int = 100
    """Test images."""

    def module(self) -> nn.Module:
        if self.model == "own":
            return OwnNetwork()
        return build(self.model, norm=self.norm, shape=self.shape, width=self.width)

    def task(self) -> Task:
        augmentation = "flip-crop" if self.shape[0] == 3 else "none"
        data = random_data(self.shape, self.nodes * self.steps * self.batch, augmentation, self.tests)
        return Task(self.module, nn.functional.cross_entropy, data)

    def experiment(self) -> Experiment:
        return Experiment(
            model="resnet20" if self.model == "own" else self.model, norm=self.norm, topology=f"ring:{self.nodes}",
            partition="iid", algorithm="qg-dsgdm-n", batch=self.batch, epochs=1000, lr=0.1, precision=self.precision,
        )


ON_A_CPU = {
    "mlp": Case("mlp", shape=(1, 8, 8), precision="fp32", references=("plain_loop",)),
    "cnn": Case("cnn", "none", shape=(1, 8, 8), precision="fp32", references=("plain_loop",)),
    "resnet20-gn": Case("resnet20", "gn", nodes=4, precision="fp32", references=("plain_loop",)),
}
ON_A_GPU = {
    "resnet20-evonorm": Case("resnet20", "evonorm", references=("plain_loop", "centralized")),
    "resnet20-gn": Case("resnet20", "gn"),
    "resnet20-bn": Case("resnet20", "bn"),
    "resnet20-released": Case("resnet20", "evonorm-released"),
    "resnet20-seeds": Case("resnet20", "evonorm", seeds=3),
    "resnet20-1024": Case("resnet20", "evonorm", nodes=1024, steps=8),
    "resnet20-fp32": Case("resnet20", "evonorm", precision="fp32", references=("centralized",)),
    "resnet18-224": Case(
        "resnet18", "evonorm", shape=(3, 224, 224), batch=64, steps=4, references=("centralized",)
    ),
    "vgg11": Case("vgg11", width=0.5, references=("centralized",)),
    "own": Case("own", references=("plain_loop",)),
}
TINY = {
    "mlp": Case("mlp", nodes=3, seeds=2, shape=(1, 8, 8), batch=4, precision="fp32", steps=2,
                references=("plain_loop", "centralized")),
    "own": Case("own", nodes=3, batch=4, precision="fp32", steps=2),
}
EVALUATED = Case("resnet20", "evonorm", steps=20, tests=10_000)
"""The models of the row `evaluation`."""


def compare(case: Case, device: torch.device, repeats: int, warm_up: float) -> dict[str, object]:
    """Images per second of a training, and of its references."""
    task, experiment = case.task(), case.experiment()
    size = f"n = {case.nodes}, batch {case.batch}, {case.seeds} seeds, {case.precision}"
    print(f"{case.model} {case.norm or ''} {case.shape}, {size}", flush=True)
    routes = {"ours": ours(task, experiment, case.seeds, device)}
    for name in case.references:
        steps = case.steps // 8 if (name, device.type) == ("plain_loop", "cuda") else case.steps
        routes[name] = REFERENCES[name](task, experiment, device, steps)
    return asdict(case) | measured(routes, repeats, warm_up)


def in_turn(name: str, before: Path, words: list[str], repeats: int, warm_up: float) -> dict[str, object]:
    """Images per second of this checkout and of an older one, each in a process, an epoch of one after the other's."""
    print(f"{name}: this checkout and {before}", flush=True)
    start = partial(
        subprocess.Popen[str], [sys.executable, __file__, "--serve", "--only", name, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    roots = {"after": Path(__file__).parents[1], "before": before}
    processes = {tree: start(env=os.environ | {"PYTHONPATH": f"{root}/src"}) for tree, root in roots.items()}

    def epoch(process: subprocess.Popen[str]) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        print(file=process.stdin, flush=True)
        return float(process.stdout.readline())

    try:
        return measured({tree: partial(epoch, process) for tree, process in processes.items()}, repeats, warm_up)
    finally:
        for process in processes.values():
            process.communicate()


def serve(case: Case, device: torch.device) -> None:
    """Train an epoch for each line that is read, and print its rate."""
    timed = ours(case.task(), case.experiment(), case.seeds, device)
    timed()
    for _ in sys.stdin:
        print(timed(), flush=True)


def evaluation(case: Case, device: torch.device, repeats: int, warm_up: float) -> dict[str, object]:
    """Images per second of a test of all models, and of one model's forward pass on as many images."""
    task, experiment = case.task(), case.experiment()
    print(f"test of {case.nodes} models on {case.tests:,} images", flush=True)
    routes = {"ours": tested(task, experiment, device), "centralized": forward(task, experiment, device, 2_000)}
    return asdict(case) | measured(routes, repeats, warm_up)


def first_step(*words: str) -> dict[str, object]:
    """Seconds of a new process to the end of its first step: without compiled kernels on disk, and with them."""
    print("first step of a new process", flush=True)
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, __file__, "--first-step", *words]
        for state in ("empty",) if "--tiny" in words else ("empty", "full"):
            began = time.perf_counter()
            subprocess.run(command, env=os.environ | caches, check=True)
            result[f"{state}_caches_s"] = time.perf_counter() - began
            print(f"    {state} caches: {result[f'{state}_caches_s']:.1f} s", flush=True)
    return result


def take_first_step(case: Case, device: torch.device) -> None:
    program = Program(case.task(), [case.experiment()], device)
    program.begin_epoch()
    program.advance(0)
    program.sums()


def measured(routes: dict[str, Timed], repeats: int, warm_up: float) -> dict[str, object]:
    """Medians of the routes' rates, and the ratios of the first to the others."""
    result: dict[str, object] = {}
    for route, timed in routes.items():
        began = time.perf_counter()
        timed()
        result[f"{route}_first_s"] = time.perf_counter() - began
        print(f"    {route}: first steps, with compilation, {result[f'{route}_first_s']:.1f} s", flush=True)
        while time.perf_counter() - began < warm_up:
            timed()
    rates: dict[str, list[float]] = {route: [] for route in routes}
    for _ in range(repeats):                        # alternate, so that a busy machine slows all routes alike
        for route, timed in routes.items():
            rates[route].append(timed())
    for route, values in rates.items():
        result[route] = statistics.median(values)
        print(f"    {route}: {result[route]:,.0f} images/s (from {min(values):,.0f} to {max(values):,.0f})", flush=True)
    first, *others = routes
    for name in others:
        ratio = statistics.median(a / b for a, b in zip(rates[first], rates[name], strict=True))
        result[f"over_{name}"] = ratio
        print(f"    {ratio:.2f} times {name}", flush=True)
    return result


REFERENCES = {"plain_loop": plain_loop, "centralized": centralized}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="measure only these rows")
    parser.add_argument("--out", help="write the results as JSON")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure this older checkout too, in turn")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    args = parser.parse_args()
    device = device_of(args.cpu or args.tiny)
    cases = TINY if args.tiny else ON_A_CPU if args.cpu else ON_A_GPU
    if args.first_step:
        take_first_step(next(iter(cases.values())), device)
        return
    if args.serve:
        serve(cases[args.only[0]], device)
        return
    words = ["--tiny"] if args.tiny else ["--cpu"] if args.cpu else []
    how = (1, 0.0) if args.tiny else (args.repeats, WARM_UP)
    rows: dict[str, Callable[[], dict[str, object]]]
    if args.before:
        rows = {name: partial(in_turn, name, args.before, words, *how) for name in cases}
    else:
        rows = {name: partial(compare, case, device, *how) for name, case in cases.items()}
        if args.tiny or device.type == "cuda":
            rows["evaluation"] = partial(evaluation, cases["own"] if args.tiny else EVALUATED, device, *how)
        rows["first-step"] = partial(first_step, *words)
    write_rows(rows, args.only, args.out)


def write_rows(rows: dict[str, Callable[[], dict[str, object]]], only: list[str] | None, out: str | None) -> None:
    """Measure the rows, or some of them, and write the results so far after each."""
    if unknown := set(only or ()) - rows.keys():
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    results = []
    for name in only or rows:
        results.append({"name": name} | rows[name]())
        if out:
            with open(out, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
