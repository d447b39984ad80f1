"""Several experiments as rows of one program: its state and its training step.

Row r·k + i is the i-th of the k nodes hosted here, of experiment r. The gradients of all rows are computed together;
then each algorithm updates its own rows (`bands.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quasiglobal.data.randomness import seeded
from quasiglobal.engines.capture import Captured, overwrite
from quasiglobal.gradients.stack import Fused, Gradients, StackedModel
from quasiglobal.training.bands import Bands, EngineFactory
from quasiglobal.training.evaluation import Evaluation
from quasiglobal.training.experiment import Experiment, together
from quasiglobal.training.feed import Feed
from quasiglobal.training.metrics import Measures, average, measures_of_all, measures_of_models
from quasiglobal.training.networks import Networks
from quasiglobal.training.partitions import partition_of
from quasiglobal.training.rows import buffers_of, named_rows, state_of
from quasiglobal.training.task import Task

WORTH_FUSING = 2.5e11
"""Parameter updates per training (steps × rows × d) above which compiling steps without a kernel pays off."""

WORTH_COMPILING = 2e12
"""The same for gradients of transformers, which take 45 s to compile for each text length (docs/transformers.md)."""

TESTS = 2**40
"""Beyond the number of any step: keys of the random numbers of tests."""

StepRunner = Callable[[Hashable, Callable[[], None]], None]
"""Runs a step; steps with equal keys run the same operations on the same tensors."""


@dataclass
class ProgramState:
    """Everything that a step changes, except the algorithms' states (`Band.state`) and the feed's counters."""

    x: Tensor
    """[rows, d]"""
    buffers: dict[str, Tensor]
    loss: Tensor
    """[rows], summed over the examples of the current epoch."""
    right: Tensor
    """[rows], number of correctly classified examples of the current epoch."""
    epochs: int = 0
    """Number of completed epochs."""


class Program:
    """Several experiments as rows of one program, for the nodes that an engine hosts.

    The experiments may differ in the fields `experiment.OWN`, such as the seed, the partition, the learning rate and
    the algorithm. `engine` is the simulator by default. `workers` processes read data that are read anew in each epoch.
    `model` reuses the compiled kernels of an earlier program of the same task. `capture` returns a `StepRunner` for
    in-place steps; by default it uses CUDA graphs if one GPU hosts all nodes.
    """

    def __init__(
        self,
        task: Task,
        experiments: Sequence[Experiment],
        device: torch.device,
        engine: EngineFactory | None = None,
        *,
        recomputing: bool = False,
        workers: int = 0,
        model: StackedModel | None = None,
        capture: Callable[[Callable[[], list[Tensor]]], StepRunner] | None = None,
    ) -> None:
        self.task, self.experiments, self.device = task, together(experiments), device
        networks = Networks(task, self.experiments, device)
        self.layout = networks.layout
        self.bands = Bands(self.experiments, self.layout.shared, *([engine] if engine else []))
        self.engine = self.bands.engine
        self.partitions = [partition_of(task.data, one) for one in self.experiments]
        self.feed = Feed(
            task.data, self.experiments, self.partitions, self.engine.nodes, device, networks.dtype, workers
        )
        networks.check_batches(self.feed.plan.sizes)
        x, buffers = networks.start(len(self.engine.nodes))
        self.state = ProgramState(x, buffers, loss=x.new_zeros(len(x)), right=x.new_zeros(len(x)))
        self.bands.begin_at(x)
        can_capture = device.type == "cuda" and self.engine.waits_for_nobody and not task.draws_elsewhere
        if capture is None and can_capture and not recomputing:     # recomputing reads RNG states: not capturable
            capture = Captured
        self._runner = capture(self._tensors) if capture else None
        changed = self.steps * x.numel()
        self._fused = changed >= WORTH_FUSING
        long = capture is not None and changed >= WORTH_COMPILING
        self.model = model or networks.stacked(recomputing=recomputing, long=long)
        if self._fused and device.type == "cuda":
            self.model.route.fuses = True
            by_kernel = getattr(self.feed.inputs, "by_kernel", False)
            if task.data.pad is None and not by_kernel:     # texts have other shapes in each batch
                self.feed.show = Fused(self.feed.show)
        self.evaluation = Evaluation(task, self.model, device, networks.dtype)

    @property
    def experiment(self) -> Experiment:
        """The first experiment; use it only for fields that all experiments share."""
        return self.experiments[0]

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.feed.steps_per_epoch * self.experiment.epochs

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.state.epochs >= self.experiment.epochs

    # -------------------------------------------------------------------------------------------- steps

    def train_epoch(self, after_step: Callable[[int], None] | None = None) -> list[Measures]:
        """Train every node here for one epoch; return the measures of each experiment.

        `after_step` is called with the number of completed steps, counted from the start of the run.
        """
        began = time.perf_counter()
        self.begin_epoch()
        first = self.state.epochs * self.feed.steps_per_epoch
        for step in range(self.feed.steps_per_epoch):
            self.advance(step)
            if after_step is not None:
                after_step(first + step + 1)
        self.state.epochs += 1
        loss, right = self.sums()
        seconds, examples, done = time.perf_counter() - began, self.feed.examples, first + self.feed.steps_per_epoch
        return [
            {
                "epoch": self.state.epochs,
                "step": done,
                "lr": self.feed.schedules[r](done),
                "nodes": list(self.engine.nodes),
                "loss": [value / examples for value in loss[r]],
                **({"train_accuracy": [value / examples for value in right[r]]} if self.task.classifies else {}),
                "images_per_second": examples * self.bands.rows / seconds,
            }
            for r in range(len(self.experiments))
        ]

    def begin_epoch(self) -> None:
        """Draw the epoch's batches and reset the sums."""
        self.feed.load(self.state.epochs)
        self.state.loss.zero_()
        self.state.right.zero_()

    def advance(self, step: int) -> None:
        """Run step 0, 1, … of the epoch."""
        t, shape = self.state.epochs * self.feed.steps_per_epoch + step + 1, self.feed.shapes[step]
        self.feed.read(step)
        with self.seeded(t):
            if self._runner is None:
                self._step(t, *shape)
            else:
                self._runner((*self.bands.kind(t), shape), partial(self._step, t, *shape))

    def sums(self) -> tuple[list[list[float]], list[list[float]]]:
        """Loss and number of correct predictions of each experiment's nodes, summed over the epoch so far."""
        loss, right = (
            values.view(len(self.experiments), -1).tolist() for values in (self.state.loss, self.state.right)
        )
        return loss, right

    def warm_up(self) -> None:
        """Compute and discard a gradient: the first gradient is slow, and no neighbour should wait for it."""
        self.begin_epoch()
        with self.seeded(0):
            self.gradients()

    def gradients(self) -> Gradients:
        """The gradients of all rows on the current batch; no state changes."""
        shape = self.feed.shapes[int(self.feed.counter)]
        self.feed.read(int(self.feed.counter))
        return self.model.gradients(self.state.x, self.state.buffers, *self.feed.batch(*shape))

    def seeded(self, t: int) -> AbstractContextManager[None]:
        """Seed the random numbers of step t (dropout) from the seeds, the first node here and the step.

        A resumed run draws the same numbers again. Another placement of nodes on processes, or another set of seeds
        trained together, draws other numbers from the same distribution.
        """
        if not self.model.random:
            return nullcontext()
        seeds = (one.seed for one in self.experiments)
        return seeded(self.device, *seeds, self.engine.nodes[0], t, elsewhere=self.task.draws_elsewhere)

    def _step(self, t: int, size: int, *need: int) -> None:
        """Run step t on the current batch, entirely on the device."""
        state, in_place = self.state, self._runner is not None
        found = self.model.gradients(state.x, state.buffers, *self.feed.batch(size, *need))
        g = found.g if self.experiment.clip is None else clipped(found.g, self.experiment.clip)
        state.x = self.bands.step(
            state.x, g, t, self.feed.time, self.feed.rate(), self._full_gradient, in_place, self._fused
        )
        if in_place:
            overwrite(list(state.buffers.values()), list(found.buffers.values()))
        else:
            state.buffers = found.buffers
        state.loss.add_(found.losses * size)
        state.right.add_(found.right * size)
        self.feed.advance()

    def _full_gradient(self, rows: slice, x: Tensor) -> Tensor:
        """The gradient over all examples of each node, without augmentation."""
        total, examples = torch.zeros_like(x), len(self.feed.plan.owners[0].examples)
        buffers = {name: value[rows] for name, value in self.state.buffers.items()}
        for positions, need in self.feed.everything:
            index = positions[rows]
            targets = tree_map(lambda values, index=index: values[index], self.feed.targets)
            g = self.model.gradients(x, buffers, self.feed.inputs.show(index, *need), targets).g
            total += g * index.shape[1]
        return total / examples

    def _tensors(self) -> list[Tensor]:
        """All tensors that a step changes."""
        state, feed = self.state, self.feed
        models = [state.x, *self.bands.tensors(), *state.buffers.values()]
        return [*models, feed.counter, feed.time, state.loss, state.right]

    # -------------------------------------------------------------------------------------------- tests

    def evaluate(self) -> list[Measures]:
        """Test the models of each experiment, and their average if all nodes are here."""
        nodes, runs = len(self.engine.nodes), len(self.experiments)
        everybody = nodes == self.engine.topology.n
        x, buffers = self.with_averages() if everybody else (self.state.x, self.state.buffers)
        owners = [*self.engine.nodes] * runs + [-1] * (len(x) - runs * nodes)
        steps = self.state.epochs * self.feed.steps_per_epoch
        with self.seeded(TESTS + steps):                    # for models that draw random numbers in tests too
            tested = self.evaluation(x, buffers, owners)
        found: list[Measures] = []
        for r, own in enumerate(self.state.x.view(runs, nodes, -1)):
            measures = tested.measures(slice(r * nodes, (r + 1) * nodes))
            measures |= measures_of_models(own, self.bands.bytes_per_step[r] * steps)
            if everybody:
                measures |= measures_of_all(own, tested.of_model(runs * nodes + r))
            found.append(measures)
        return found

    def evaluate_average(self, rows: dict[str, Tensor]) -> Measures:
        """The measures that need all models of a run; `rows` are the rows of all nodes, as returned by `rows_of`."""
        x = rows["x"].to(self.device)
        buffers = {name: average(value.to(self.device), dim=0)[None] for name, value in buffers_of(rows).items()}
        return measures_of_all(x, self.evaluation(average(x, dim=0)[None], buffers, [-1]).of_model(0))

    def with_averages(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The models and buffers of all rows, followed by the mean over the nodes of each experiment."""
        def followed(values: Tensor) -> Tensor:
            by_run = values.view(len(self.experiments), len(self.engine.nodes), *values.shape[1:])
            return torch.cat([values, average(by_run, dim=1)])

        return followed(self.state.x), {name: followed(value) for name, value in self.state.buffers.items()}

    # ------------------------------------------------------------------------------------------ checkpoints

    def rows_of(self, run: int) -> dict[str, Tensor]:
        """All rows that an experiment needs to resume: x, state and buffers."""
        rows = slice(run * len(self.engine.nodes), (run + 1) * len(self.engine.nodes))
        buffers = {name: value[rows] for name, value in self.state.buffers.items()}
        return named_rows(self.state.x[rows], self.bands.state_of(run), buffers)

    def begin_at(self, x: Tensor) -> None:
        """Initialise the algorithms at the models x."""
        self.state.x = x
        self.bands.begin_at(x)

    def restore(self, saved: Sequence[dict[str, Tensor]], epochs: int) -> None:
        """Resume after `epochs` epochs from the rows of every experiment, as returned by `rows_of`."""
        def stacked(values: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(values)).to(self.device)

        self.state.x = stacked([rows["x"] for rows in saved])
        kept = [buffers_of(rows) for rows in saved]
        self.state.buffers = {name: stacked([buffers[name] for buffers in kept]) for name in self.state.buffers}
        self.bands.restore([state_of(rows) for rows in saved], self.device)
        self.state.epochs = epochs


def clipped(g: Tensor, largest: float) -> Tensor:
    """Scale each row whose norm exceeds `largest` down to it, as `torch.nn.utils.clip_grad_norm_` does.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    factor: Tensor = (largest / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
    return g * factor
