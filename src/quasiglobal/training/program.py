"""Training, on the simulator: the one loop, its measures, and how it survives."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quasiglobal.algorithms import algorithm
from quasiglobal.data.batches import Epoch, Owner, Plan, step_sizes
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.partition import Indices, fingerprint, split
from quasiglobal.data.randomness import seeded
from quasiglobal.data.sources import Dataset
from quasiglobal.engines.allocator import keep_freed_memory
from quasiglobal.engines.band import Band, overwrite
from quasiglobal.engines.capture import Captured
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.host import Host
from quasiglobal.engines.simulator import NO_MEAN, Simulator, warn_of_w
from quasiglobal.errors import InputError
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.stack import PRECISIONS, Buffers, Loss, StackedModel
from quasiglobal.models.language.checkpointing import recompute
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import Record, consensus_distance
from quasiglobal.training.schedule import Schedule


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

    They may differ in what a row has of its own (`OWN`): the seed, the partition of the data, the learning rate, the
    algorithm. All share the gradients' computation; those next to each other that step alike are a band. `model` is
    that of an earlier training of the same task, whose programs need not be compiled again.
    """

    def __init__(
        self,
        task: Task,
        experiments: Sequence[Experiment],
        device: torch.device,
        engine: Callable[..., Host] = Simulator,
        recomputing: bool = False,
        model: StackedModel | None = None,
    ) -> None:
        self.task, self.experiments, self.device = task, together(experiments), device
        self.experiment = experiment = self.experiments[0]
        self.seeds = tuple(one.seed for one in self.experiments)
        self.dtype = PRECISIONS[experiment.precision]

        modules = [task.module(seed).to(self.dtype) for seed in self.seeds]
        self.layout = Layout.of_experiment(modules[0], experiment.bn)
        self.model = model or self._stacked(recomputing)
        self.bands = _bands(self.experiments, self.layout.shared, engine)
        self.engine = self.bands[0].engine
        self.graph = self.engine.topology
        self.rows = sum(band.engine.rows for band in self.bands)

        train = task.data.train
        self.parts = [partition_of(task.data, one) for one in self.experiments]
        self.inputs = inputs_of(task.data, train, device=device, dtype=self.dtype, moving=experiment.augment)
        self.test_inputs = inputs_of(task.data, task.data.test, device=device, dtype=self.dtype)
        self.targets, self.test_targets = train.y.to(device), task.data.test.y.to(device)

        runs, here = zip(self.seeds, self.parts, strict=True), self.engine.nodes
        owners = [Owner(seed, i, parts[i]) for seed, parts in runs for i in here]
        lengths = [[len(part) for part in parts] for parts in self.parts]
        if len({tuple(step_sizes(of, experiment.batch, experiment.steps)) for of in lengths}) > 1:
            raise InputError("runs that train together need epochs of as many steps; use partitions of equal sizes")
        self.plan = Plan(
            owners, experiment.batch, self.inputs.draw, lengths[0], experiment.steps, self.inputs.need
        )
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

        hosted = len(self.engine.nodes)
        starts = [self.layout.row(dict(module.named_parameters())) for module in modules]
        self.x = torch.stack(starts).repeat_interleave(hosted, dim=0).to(device)
        kept = [self.layout.buffers(module) for module in modules]
        self.buffers: Buffers = {
            name: torch.stack([own[name] for own in kept]).repeat_interleave(hosted, dim=0).to(device)
            for name in kept[0]
        }
        self.begin_at(self.x)
        self.epochs_done = 0
        self._static: dict[str, Tensor] = {}
        self._shapes: Sequence[tuple[int, ...]] = ()
        if device.type == "cpu":
            keep_freed_memory()
        on_one_gpu = device.type == "cuda" and isinstance(self.engine, Simulator)
        capturing = on_one_gpu and not recomputing          # which reads the state of generators, and no graph can
        self._captured = Captured(self._tensors) if capturing else None
        changed = self.steps * self.x.numel()
        self._fused = changed >= WORTH_FUSING
        self.model.compiles = capturing and changed >= WORTH_COMPILING

    def _stacked(self, recomputing: bool) -> StackedModel:
        """All copies of the model as one program."""
        module = self.task.module(0).to(self.device, self.dtype)
        if recomputing:
            recompute(module)
        return StackedModel(module, self.task.loss, self.layout, self.experiment.precision)

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
                "images_per_second": examples * self.rows / seconds,
            }
            for r in range(len(self.seeds))
        ]

    def begin_epoch(self) -> None:
        """Draw the epoch's batches and put them where the steps find them."""
        self._load(self.plan.epoch(self.epochs_done, self.device))

    def advance(self, step: int) -> None:
        """Step 0, 1, … of the epoch."""
        t, shape = self.epochs_done * self.steps_per_epoch + step + 1, self._shapes[step]
        with self._draws(t):
            if self._captured is None:
                self._step(t, *shape)
            else:
                self._captured((*(band.kind(t) for band in self.bands), shape), partial(self._step, t, *shape))

    def _draws(self, t: int) -> AbstractContextManager[None]:
        """Around a step: what its models draw for dropout is a function of the seeds, who is here, and the step.

        So a run that goes on draws what it would have drawn; but nodes that are spread over processes otherwise, or
        trained together with other seeds, draw other numbers of the same distribution.
        """
        if not self.model.random:
            return nullcontext()
        return seeded(self.device, *self.seeds, self.engine.nodes[0], t)

    def sums(self) -> tuple[list[list[float]], list[list[float]]]:
        """Each run's and node's loss and right answers so far in the epoch, summed over its examples."""
        loss, right = (self._static[name].view(len(self.seeds), -1).tolist() for name in ("loss", "right"))
        return loss, right

    def _step(self, t: int, size: int, *need: int) -> None:
        """Step t on the batch that the counter points at; everything happens on the device."""
        static = self._static
        at = static["counter"]
        losses, right, g, buffers = self.model.gradients(self.x, self.buffers, *self._batch(size, *need))
        self._update(t, g, self._rates(static["lr"].index_select(0, at)[0]))
        if self._captured is None:
            self.buffers = buffers
        else:
            overwrite(list(self.buffers.values()), list(buffers.values()))
        static["loss"].add_(losses * size)
        static["right"].add_(right * size)
        at.add_(1)
        static["time"].add_(1)

    def _update(self, t: int, g: Tensor, lr: Tensor) -> None:
        """Step t of every band's algorithm; in place where a captured graph holds on to the storage."""
        stepped = []
        for band in self.bands:
            rows = band.rows
            own = lr if lr.ndim == 0 else lr[rows]
            how = (t, self._static["time"], own, partial(self._full_gradient, rows))
            if self._captured is not None:
                band.overwrite(self.x[rows], g[rows], *how, fused=self._fused)
            else:
                stepped.append(band.step(self.x[rows], g[rows], *how))
        if stepped:
            self.x = stepped[0] if len(stepped) == 1 else torch.cat(stepped)

    def _rates(self, rates: Tensor) -> Tensor:
        """The runs' learning rates as a step takes them: one number where they are equal, else one a row."""
        if self._one_rate:
            return rates[0]
        return rates.repeat_interleave(len(self.engine.nodes))[:, None]

    def _batch(self, size: int, *need: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets that the counter points at, of every row here."""
        names = ("index", "flip", "place") if self.inputs.moving else ("index",)
        at = self._static["counter"]
        index, *moves = (self._static[name].index_select(0, at)[0, :, :size] for name in names)
        return self.inputs.show(index, *moves, *need), self.targets[index]

    def warm_up(self) -> None:
        """Compute a gradient and forget it: the first takes long, which nobody else should wait for."""
        self.begin_epoch()
        with self._draws(0):
            self.model.gradients(self.x, self.buffers, *self._batch(*self._shapes[0]))

    def _tensors(self) -> list[Tensor]:
        """All that a step changes."""
        changing = [self._static[name] for name in ("counter", "time", "loss", "right")]
        states = [value for band in self.bands for value in band.state.values()]
        return [self.x, *states, *self.buffers.values(), *changing]

    def _load(self, epoch: Epoch) -> None:
        """Put an epoch's draws where the steps find them."""
        self._shapes = epoch.shapes
        first = self.epochs_done * self.steps_per_epoch
        steps = range(first + 1, first + 1 + self.steps_per_epoch)
        rates = [[schedule(step) for schedule in self.schedules] for step in steps]
        values = dict(zip(("flip", "place"), epoch.moves, strict=False)) | {
            "index": epoch.index,
            "lr": torch.tensor(rates, dtype=self.dtype, device=self.device),
            "counter": torch.zeros(1, dtype=torch.int64, device=self.device),
            "time": torch.tensor(first + 1, dtype=self.dtype, device=self.device),
            "loss": torch.zeros(self.rows, dtype=self.dtype, device=self.device),
            "right": torch.zeros(self.rows, dtype=self.dtype, device=self.device),
        }
        for name, value in values.items():
            if name in self._static:
                self._static[name].copy_(value)
            else:
                self._static[name] = value

    def _full_gradient(self, rows: slice, x: Tensor) -> Tensor:
        """The gradient over all of each node's own examples, as they are, weight decay included."""
        total, everything = torch.zeros_like(x), len(self.plan.owners[0].examples)
        buffers = {name: value[rows] for name, value in self.buffers.items()}
        for examples, need in self._examples:
            index = examples[rows]
            _, _, g, _ = self.model.gradients(x, buffers, self.inputs.show(index, *need), self.targets[index])
            total += g * index.shape[1]
        return total / everything + self.experiment.weight_decay * x

    @cached_property
    def _examples(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The positions [k, size] of every row's own examples, some at a time, and what those need."""
        if len({len(owner.examples) for owner in self.plan.owners}) > 1:
            raise InputError("an algorithm that takes full gradients needs nodes of equal size; use another partition")
        everything = np.stack([owner.examples for owner in self.plan.owners])
        pieces = [everything[:, first : first + 256] for first in range(0, everything.shape[1], 256)]
        return [(torch.from_numpy(piece).to(self.device), self.inputs.need(piece)) for piece in pieces]

    # -------------------------------------------------------------------------------------------- measures

    def evaluate(self) -> list[Record]:
        """How good each run's models are on the test data, one by one, and averaged where all are here."""
        n, runs = len(self.engine.nodes), len(self.seeds)
        by_run = self.x.view(runs, n, -1)
        everybody = self._score(self._with_averages(self.x), tree_map(self._with_averages, self.buffers))
        accuracy, loss = (values[: runs * n].view(runs, n) for values in everybody[:2])
        recall = everybody[2][: runs * n].view(runs, n, -1)
        averaged = everybody[0][runs * n :]
        norms = by_run.norm(dim=-1)
        steps = self.epochs_done * self.steps_per_epoch
        measures = [
            {
                "accuracy": accuracy[r].tolist(),
                "test_loss": loss[r].tolist(),
                "recall": [[share if share == share else None for share in node] for node in recall[r].tolist()],
                "weight_norm": norms[r].tolist(),
                "bytes_sent": [self.bytes_per_step[r] * steps] * n,
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
    def bytes_per_step(self) -> list[float]:
        """What a node of each run sends on average."""
        return [
            traffic(band.algorithm).bytes(band.engine.topology, self.layout.shared, band.engine.rounded)
            for band in self.bands
            for _ in band.engine.seeds
        ]

    def _score(self, x: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's accuracy and loss on the test data, and its accuracy on each class, NaN where there is none."""
        classes = len(self.task.data.classes)
        right, loss = x.new_zeros(len(x), classes), x.new_zeros(len(x))
        count = len(self.test_targets)
        for index, need in self._test_batches:
            shown = self.test_inputs.show(index, *need)
            output = self.model.outputs(x, buffers, shown).to(self.dtype).flatten(1, 2)
            target = self.test_targets[index].flatten()
            right.index_add_(1, target, (output.argmax(dim=-1) == target).to(right.dtype))
            loss += self.model.losses(output, target) * len(target)
        return right.sum(dim=1) / count, loss / count, right / torch.bincount(self.test_targets, minlength=classes)

    @cached_property
    def _test_batches(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Positions [batches, batch], and what those examples need; 32 where the model normalises by the test batch.

        The released network does, in test order, so that this is part of the experiment. As many go through the
        models at a time as the memory surely holds.
        """
        by_batch = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats
            for part in self.model.module.modules()
        )
        at_once = SHOWN_AT_ONCE // (len(self.x) * self.test_inputs.cost)
        size = 32 if by_batch else min(500, max(32, at_once))
        order = torch.from_numpy(self.test_inputs.order)
        count = len(order)
        whole, rest = order[: count // size * size].view(-1, size), order[count // size * size :]
        together = torch.split(whole, min(16, max(1, at_once // size)) if by_batch else 1)
        batches = [positions for positions in (*together, rest[None]) if positions.numel()]
        return [(positions.to(self.device), self.test_inputs.need(positions.numpy())) for positions in batches]

    # ------------------------------------------------------------------------------------------ checkpoints

    def rows_of(self, run: int) -> dict[str, Tensor]:
        """All that a run needs to go on: its rows of x, state and buffers."""
        begin, end = run * len(self.engine.nodes), (run + 1) * len(self.engine.nodes)
        band = next(band for band in self.bands if begin < band.rows.stop)
        inside = slice(begin - band.rows.start, end - band.rows.start)
        tensors = {"x": self.x[begin:end]}
        tensors |= {f"state.{name}": value[inside] for name, value in band.state.items()}
        tensors |= {f"buffer.{name}": value[begin:end] for name, value in self.buffers.items()}
        return {name: value.clone().cpu() for name, value in tensors.items()}

    def begin_at(self, x: Tensor) -> None:
        """Start the algorithms at these models."""
        self.x = x
        for band in self.bands:
            band.begin_at(x[band.rows])

    def restore(self, saved: Sequence[dict[str, Tensor]], epochs_done: int) -> None:
        """Go on from the rows of every run after this many epochs."""
        def stacked(name: str, of: Sequence[dict[str, Tensor]]) -> Tensor:
            return torch.cat([run[name] for run in of]).to(self.device)

        self.x = stacked("x", saved)
        self.buffers = {name: stacked(f"buffer.{name}", saved) for name in self.buffers}
        first = 0
        for band in self.bands:
            own = saved[first : (first := first + len(band.engine.seeds))]
            band.state = {name: stacked(f"state.{name}", own) for name in band.state}
        self.epochs_done = epochs_done

    def fingerprint(self, run: int) -> str:
        """Who holds which examples."""
        return fingerprint(self.parts[run])


OWN = (
    "seed", "partition", "alpha", "lr", "warmup", "warmup_from", "milestones", "decay", "algorithm", "topology",
)
"""What experiments that are rows of one program may differ in; their topologies have as many nodes."""

SHOWN_AT_ONCE = 2**15
"""Images in a test, counted for every model; a text counts for several (`Texts.cost`)."""

WORTH_FUSING = 2.5e11
"""Numbers that the algorithms change in a training, from which on compiling their steps pays (docs/performance.md)."""

WORTH_COMPILING = 2e12
"""The same for transformers' gradients, which take 45 s to compile for each length of texts (docs/transformers.md)."""


def in_common(experiment: Experiment) -> dict[str, Any]:
    """What experiments that are rows of one program have to share."""
    values = {name: value for name, value in asdict(experiment).items() if name not in OWN}
    return values | {"number of nodes": parse(experiment.topology).n}


def partition_of(data: Dataset, experiment: Experiment) -> list[Indices]:
    """Who holds which training examples."""
    key = (experiment.partition, parse(experiment.topology).n, experiment.alpha, experiment.seed)
    dealt = DEALT.setdefault(data, {})
    if key not in dealt:
        dealt[key] = split(key[0], data.train.y.numpy(), *key[1:], data.train.columns)
    return dealt[key]


DEALT: WeakKeyDictionary[Dataset, dict[tuple[str, int, float, int], list[Indices]]] = WeakKeyDictionary()
"""Who holds what of a data set, once for all runs that deal alike: few classes among many nodes take seconds."""


def together(experiments: Sequence[Experiment]) -> tuple[Experiment, ...]:
    """The experiments, if they can be rows of one program."""
    first = in_common(experiments[0])
    for one in experiments:
        for name, value in in_common(one).items():
            if value != first[name]:
                raise InputError(f"runs that train together need one {name}, got {first[name]} and {value}")
    return tuple(experiments)


def _bands(experiments: Sequence[Experiment], shared: int, engine: Callable[..., Host]) -> list[Band]:
    """The rows of those that step alike, one after the other."""
    bands, first = [], 0
    for (name, topology), alike in groupby(experiments, key=lambda one: (one.algorithm, one.topology)):
        group = list(alike)
        chosen, graph, experiment = algorithm(name), parse(topology), group[0]
        warn_of_w(chosen, graph)
        faults = {what: p for what in ("drop", "churn") if (p := getattr(experiment, what))}
        if faults and traffic(chosen).everybody:            # now, and not at the first mean of a long run
            raise InputError(NO_MEAN)
        rounded = experiment.wire == "bf16"
        if rounded and chosen.needs_full_precision:
            raise InputError(
                f"{name} takes its momentum from the difference of two mixed models over the learning "
                "rate, where 16 bits leave nothing but noise; use --wire full"
            )
        host = engine(graph, seeds=tuple(one.seed for one in group), shared=shared, rounded=rounded, **faults)
        bands.append(Band(chosen, host, first, experiment.weight_decay))
        first += host.rows
    return bands


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
