"""Training, on the simulator: the one loop, its measures, and how it survives."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quasiglobal import algorithms
from quasiglobal.algorithms import State
from quasiglobal.catalogue import traffic
from quasiglobal.engines.capture import Captured
from quasiglobal.engines.host import Host
from quasiglobal.engines.memory import keep_freed_memory
from quasiglobal.engines.simulator import NO_MEAN, Simulator, warn_of_w
from quasiglobal.errors import InputError
from quasiglobal.experiment import Experiment
from quasiglobal.flat import Layout
from quasiglobal.measures import Record, consensus_distance
from quasiglobal.schedules import Schedule
from quasiglobal.tasks.batches import Epoch, Owner, Plan
from quasiglobal.tasks.datasets import Dataset
from quasiglobal.tasks.gradients import PRECISIONS, Buffers, Loss, StackedModel
from quasiglobal.tasks.images import Images
from quasiglobal.tasks.partition import fingerprint, split
from quasiglobal.topology import parse


@dataclass(frozen=True)
class Task:
    """What the nodes learn: a model, a loss and data.

    `model` is an `nn.Module`, whose weights are everybody's start, or a function that makes one, called with
    torch seeded by the run's seed.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    data: Dataset

    def module(self, seed: int) -> nn.Module:
        """A new copy of the model at its start."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()


class Training:
    """Several experiments as rows of one program, of the nodes that an engine hosts.

    They may differ in what a row has of its own (`OWN`): the seed, the partition of the data, the learning rate.
    """

    def __init__(
        self,
        task: Task,
        experiments: Sequence[Experiment],
        device: torch.device,
        engine: Callable[..., Host] = Simulator,
    ) -> None:
        self.task, self.experiments, self.device = task, together(experiments), device
        self.experiment = experiment = self.experiments[0]
        self.seeds = tuple(one.seed for one in self.experiments)
        self.algorithm = algorithms.algorithm(experiment.algorithm)
        self.graph = parse(experiment.topology)
        warn_of_w(self.algorithm, self.graph)
        faults = {name: p for name in ("drop", "churn") if (p := getattr(experiment, name))}
        if faults and traffic(self.algorithm).everybody:            # now, and not at the first mean of a long run
            raise InputError(NO_MEAN)
        rounded = experiment.wire == "bf16"
        if rounded and self.algorithm.needs_full_precision:
            raise InputError(
                f"{experiment.algorithm} takes its momentum from the difference of two mixed models over the learning "
                "rate, where 16 bits leave nothing but noise; use --wire full"
            )
        self.dtype = PRECISIONS[experiment.precision]

        modules = [task.module(seed).to(self.dtype) for seed in self.seeds]
        self.layout = Layout.of_experiment(modules[0], experiment.bn)
        self.model = StackedModel(task.module(0).to(device, self.dtype), task.loss, self.layout, experiment.precision)
        self.engine = engine(self.graph, seeds=self.seeds, shared=self.layout.shared, rounded=rounded, **faults)

        train = task.data.train
        self.parts = [
            split(one.partition, train.y.numpy(), self.graph.n, one.alpha, one.seed, train.columns)
            for one in self.experiments
        ]
        self.images = Images.of(task.data, train, device=device, dtype=self.dtype, moving=experiment.augment)
        self.test_images = Images.of(task.data, task.data.test, device=device, dtype=self.dtype)
        self.targets, self.test_targets = train.y.to(device), task.data.test.y.to(device)

        runs, here = zip(self.seeds, self.parts, strict=True), self.engine.nodes
        owners = [Owner(seed, i, parts[i]) for seed, parts in runs for i in here]
        lengths = [len(part) for parts in self.parts for part in parts]
        self.plan = Plan(owners, experiment.batch, self.images.draw, lengths, experiment.steps)
        self.steps_per_epoch = len(self.plan.sizes)
        self.steps = self.steps_per_epoch * experiment.epochs
        self.schedules = [
            Schedule(
                peak=one.peak_lr,
                steps=self.steps,
                warmup_steps=round(one.warmup * self.steps_per_epoch),
                warmup_from=one.warmup_from,
                milestones=one.milestones,
                decay=one.decay,
            )
            for one in self.experiments
        ]
        self._one_rate = all(schedule == self.schedules[0] for schedule in self.schedules)

        rows = len(self.engine.nodes)
        starts = [self.layout.row(dict(module.named_parameters())) for module in modules]
        self.x = torch.stack(starts).repeat_interleave(rows, dim=0).to(device)
        self.buffers: Buffers = {
            name: torch.stack([dict(module.named_buffers())[name] for module in modules])
            .repeat_interleave(rows, dim=0)
            .to(device)
            for name, _ in modules[0].named_buffers()
        }
        self.state: State = {}
        self.begin_at(self.x)
        self.epochs_done = 0
        self._static: dict[str, Tensor] = {}
        if device.type == "cpu":
            keep_freed_memory()
        on_one_gpu = device.type == "cuda" and isinstance(self.engine, Simulator)
        self._captured = Captured(self._tensors) if on_one_gpu else None

    # -------------------------------------------------------------------------------------------- the loop

    def train_epoch(self) -> list[Record]:
        """One pass of every node here through its data; each run's measures, lists have an entry a node."""
        began = time.perf_counter()
        self.begin_epoch()
        for step in range(self.steps_per_epoch):
            self.advance(step)
        self.epochs_done += 1
        examples = sum(self.plan.sizes)
        loss, right = ([[value / examples for value in run] for run in sums] for sums in self.sums())
        seconds = time.perf_counter() - began
        return [
            {
                "epoch": self.epochs_done,
                "step": self.epochs_done * self.steps_per_epoch,
                "lr": self.schedules[r](self.epochs_done * self.steps_per_epoch),
                "nodes": list(self.engine.nodes),
                "loss": loss[r],
                "train_accuracy": right[r],
                "images_per_second": examples * self.engine.rows / seconds,
            }
            for r in range(len(self.seeds))
        ]

    def begin_epoch(self) -> None:
        """Draw the epoch's batches and put them where the steps find them."""
        self._load(self.plan.epoch(self.epochs_done, self.device))

    def advance(self, step: int) -> None:
        """Step 0, 1, … of the epoch."""
        t, size = self.epochs_done * self.steps_per_epoch + step + 1, self.plan.sizes[step]
        if self._captured is None:
            self._step(t, size)
        else:
            key = (self.algorithm.phase(t), (t - 1) % self.graph.period, size)
            self._captured(key, partial(self._step, t, size))

    def sums(self) -> tuple[list[list[float]], list[list[float]]]:
        """Each run's and node's loss and right answers so far in the epoch, summed over its examples."""
        loss, right = (self._static[name].view(len(self.seeds), -1).tolist() for name in ("loss", "right"))
        return loss, right

    def _step(self, t: int, size: int) -> None:
        """Step t on the batch that the counter points at; everything happens on the device."""
        static = self._static
        at = static["counter"]
        losses, right, g, buffers = self.model.gradients(self.x, self.buffers, *self._batch(size))
        lr = self._rates(static["lr"].index_select(0, at)[0])
        x, state = self.engine.step(
            self.algorithm, self.x, torch.add(g, self.x, alpha=self.experiment.weight_decay), self.state,
            t=t, time=static["time"], lr=lr, full_gradient=self._full_gradient,
        )
        self._keep(x, state, buffers)
        static["loss"].add_(losses * size)
        static["right"].add_(right * size)
        at.add_(1)
        static["time"].add_(1)

    def _rates(self, rates: Tensor) -> Tensor:
        """The runs' learning rates as a step takes them: one number where they are equal, else one a row."""
        if self._one_rate:
            return rates[0]
        return rates.repeat_interleave(len(self.engine.nodes))[:, None]

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets that the counter points at, of every row here."""
        names = ("index", "flip", "place") if self.images.moving else ("index",)
        at = self._static["counter"]
        index, *moves = (self._static[name].index_select(0, at)[0, :, :size] for name in names)
        return self.images.show(index, *moves), self.targets[index]

    def warm_up(self) -> None:
        """Compute a gradient and forget it: the first takes long, which nobody else should wait for."""
        self.begin_epoch()
        self.model.gradients(self.x, self.buffers, *self._batch(self.plan.sizes[0]))

    def _keep(self, x: Tensor, state: State, buffers: Buffers) -> None:
        """Take over the step's results; in place where a captured graph holds on to the storage."""
        if self._captured is None:
            self.x, self.state, self.buffers = x, state, buffers
            return
        held = {tensor.data_ptr() for tensor in self._tensors()}
        new = [x, *state.values(), *buffers.values()]
        safe = [value.clone() if value.data_ptr() in held else value for value in new]
        old = [self.x, *self.state.values(), *self.buffers.values()]
        for dtype in {value.dtype for value in old}:        # many at a time, which have to be of one type
            here, there = ([value for value in values if value.dtype == dtype] for values in (old, safe))
            torch._foreach_copy_(here, there)

    def _tensors(self) -> list[Tensor]:
        """All that a step changes."""
        changing = [self._static[name] for name in ("counter", "time", "loss", "right")]
        return [self.x, *self.state.values(), *self.buffers.values(), *changing]

    def _load(self, epoch: Epoch) -> None:
        """Put an epoch's draws where the steps find them."""
        first = self.epochs_done * self.steps_per_epoch
        steps = range(first + 1, first + 1 + self.steps_per_epoch)
        rates = [[schedule(step) for schedule in self.schedules] for step in steps]
        values = dict(zip(("flip", "place"), epoch.moves, strict=False)) | {
            "index": epoch.index,
            "lr": torch.tensor(rates, dtype=self.dtype, device=self.device),
            "counter": torch.zeros(1, dtype=torch.int64, device=self.device),
            "time": torch.tensor(first + 1, dtype=self.dtype, device=self.device),
            "loss": torch.zeros(self.engine.rows, dtype=self.dtype, device=self.device),
            "right": torch.zeros(self.engine.rows, dtype=self.dtype, device=self.device),
        }
        for name, value in values.items():
            if name in self._static:
                self._static[name].copy_(value)
            else:
                self._static[name] = value

    def _full_gradient(self, x: Tensor) -> Tensor:
        """The gradient over all of each node's own examples, as they are, weight decay included."""
        total = torch.zeros_like(x)
        for index in torch.split(self._examples, 256, dim=1):
            _, _, g, _ = self.model.gradients(x, self.buffers, self.images.show(index), self.targets[index])
            total += g * index.shape[1]
        return total / self._examples.shape[1] + self.experiment.weight_decay * x

    @cached_property
    def _examples(self) -> Tensor:
        """[k, size], the positions of every row's own examples."""
        if len({len(owner.examples) for owner in self.plan.owners}) > 1:
            raise InputError(f"{self.experiment.algorithm} needs nodes of equal size; use another partition")
        return torch.from_numpy(np.stack([owner.examples for owner in self.plan.owners])).to(self.device)

    # -------------------------------------------------------------------------------------------- measures

    def evaluate(self) -> list[Record]:
        """How good each run's models are on the test data, one by one, and averaged where all are here."""
        n, runs = len(self.engine.nodes), len(self.seeds)
        by_run = self.x.view(runs, n, -1)
        everybody = self._score(self._with_averages(self.x), tree_map(self._with_averages, self.buffers))
        accuracy, loss = (values[: runs * n].view(runs, n) for values in everybody)
        averaged = everybody[0][runs * n :]
        norms = by_run.norm(dim=-1)
        sent = self.bytes_per_step * self.epochs_done * self.steps_per_epoch
        measures = [
            {
                "accuracy": accuracy[r].tolist(),
                "test_loss": loss[r].tolist(),
                "weight_norm": norms[r].tolist(),
                "bytes_sent": [sent] * n,
            }
            for r in range(runs)
        ]
        if n == self.graph.n:
            distance = consensus_distance(by_run)
            for r, found in enumerate(measures):
                found |= {"accuracy_averaged": float(averaged[r]), "consensus_distance": float(distance[r])}
        return measures

    def _with_averages(self, values: Tensor) -> Tensor:
        """Every row, and after them each run's mean."""
        by_run = values.view(len(self.seeds), len(self.engine.nodes), *values.shape[1:])
        return torch.cat([values, average(by_run, dim=1)])

    @cached_property
    def bytes_per_step(self) -> float:
        """What a node sends on average."""
        return traffic(self.algorithm).bytes(self.graph, self.layout.shared, self.engine.rounded)

    def _score(self, x: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Each row's accuracy and loss on the test data, in test order."""
        right, loss = x.new_zeros(len(x)), x.new_zeros(len(x))
        count = len(self.test_targets)
        for index in self._test_batches(count):
            output = self.model.outputs(x, buffers, self.test_images.show(index)).to(self.dtype).flatten(1, 2)
            target = self.test_targets[index].flatten()
            right += (output.argmax(dim=-1) == target).sum(dim=1)
            losses = nn.functional.cross_entropy(output.flatten(0, 1), target.repeat(len(x)), reduction="none")
            loss += losses.view(len(x), -1).sum(dim=1)
        return right / count, loss / count

    def _test_batches(self, count: int) -> list[Tensor]:
        """Positions [batches, batch]: batches of 32 where the model normalises by the test batch itself.

        The released network does, in test order, so that this is part of the experiment. Sixteen batches go
        through the models at a time.
        """
        by_batch = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats
            for part in self.model.module.modules()
        )
        size = 32 if by_batch else 500
        order = torch.arange(count, device=self.device)
        whole, rest = order[: count // size * size].view(-1, size), order[count // size * size :]
        together = torch.split(whole, 16 if by_batch else 1)
        return [batches for batches in (*together, rest[None]) if batches.numel()]

    # ------------------------------------------------------------------------------------------ checkpoints

    def rows_of(self, run: int) -> dict[str, Tensor]:
        """All that a run needs to go on: its rows of x, state and buffers."""
        rows = slice(run * len(self.engine.nodes), (run + 1) * len(self.engine.nodes))
        tensors = {"x": self.x}
        tensors |= {f"state.{name}": value for name, value in self.state.items()}
        tensors |= {f"buffer.{name}": value for name, value in self.buffers.items()}
        return {name: value[rows].clone().cpu() for name, value in tensors.items()}

    def begin_at(self, x: Tensor) -> None:
        """Start the algorithm at these models."""
        self.x = x
        self.state = {name: value.clone() for name, value in self.algorithm.init(x).items()}

    def restore(self, saved: Sequence[dict[str, Tensor]], epochs_done: int) -> None:
        """Go on from the rows of every run after this many epochs."""
        def stacked(name: str) -> Tensor:
            return torch.cat([run[name] for run in saved]).to(self.device)

        self.x = stacked("x")
        self.state = {name: stacked(f"state.{name}") for name in self.state}
        self.buffers = {name: stacked(f"buffer.{name}") for name in self.buffers}
        self.epochs_done = epochs_done

    def fingerprint(self, run: int) -> str:
        """Who holds which examples."""
        return fingerprint(self.parts[run])


OWN = ("seed", "partition", "alpha", "lr", "warmup", "warmup_from", "milestones", "decay")
"""What experiments that are rows of one program may differ in."""


def together(experiments: Sequence[Experiment]) -> tuple[Experiment, ...]:
    """The experiments, if they can be rows of one program."""
    first = experiments[0]
    for one in experiments:
        for name, value in asdict(one).items():
            if name not in OWN and value != getattr(first, name):
                raise InputError(f"runs that train together need one {name}, got {getattr(first, name)} and {value}")
    return tuple(experiments)


def epochs(training: Training) -> Iterator[list[Record]]:
    """Train to the end, yielding the measures of each run after every epoch, lists with an entry a node."""
    every = training.experiment.eval_every
    while training.epochs_done < training.experiment.epochs:
        records = training.train_epoch()
        if training.epochs_done % every == 0 or training.epochs_done == training.experiment.epochs:
            records = [record | test for record, test in zip(records, training.evaluate(), strict=True)]
        yield records


def average(values: Tensor, dim: int) -> Tensor:
    """The mean over nodes, in double precision; of counters too."""
    return values.double().mean(dim=dim).to(values.dtype)


def diverged(record: Record, bound: float = 1e4) -> bool:
    """Whether a run is beyond help: its loss is no number, or above any that learning has."""
    return not math.isfinite(record["loss"]) or record["loss"] > bound
