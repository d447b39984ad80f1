"""Several experiments as rows of one program: its state and its training step.

Row r·k + i is the i-th of the k nodes hosted here, of experiment r. The gradients of all rows are computed together;
then each algorithm updates its own rows (`bands.py`).
"""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quasiglobal.common.memory import keep_freed_memory
from quasiglobal.common.modules import converted, copied
from quasiglobal.common.randomness import seeded
from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError
from quasiglobal.metrics import accuracy
from quasiglobal.models.language import recompute
from quasiglobal.stacked.capture import Captured, overwrite, release
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.one_model import Buffers, arguments
from quasiglobal.stacked.precision import PRECISIONS
from quasiglobal.stacked.routes import OneByOne, Vectorised
from quasiglobal.stacked.stack import Fused, Gradients, Stack, stacked_rows
from quasiglobal.training.bands import Bands, EngineFactory
from quasiglobal.training.evaluation import Evaluation
from quasiglobal.training.experiment import Experiment, together
from quasiglobal.training.feed import Feed
from quasiglobal.training.metrics import Measures, average, measures_of_all
from quasiglobal.training.rows import Checkpoint, NamedRows, buffers_of, named_rows, state_of
from quasiglobal.training.task import Task

log = logging.getLogger("quasiglobal")

WORTH_FUSING = 2.5e11
"""Parameter updates per training (steps × rows × d) above which compiling steps without a kernel pays off."""

WORTH_COMPILING = 2e12
"""The same for gradients of transformers, which take 45 s to compile for each text length (docs/transformers.md)."""

TESTS = 2**40
"""Offset of the random keys of tests; larger than any step number."""

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
    epochs: list[int]
    """Number of completed epochs of each experiment."""


class Program:
    """Several experiments as rows of one program, for the nodes that an engine hosts.

    The experiments may differ in the fields `experiment.OWN`, such as the seed, the partition, the learning rate and
    the algorithm, and in the number of completed epochs. Rows do not depend on each other: at the end of an epoch
    experiments may leave, and others take their place (`regroup`).

    `engine` is the simulator by default. `workers` processes read data that are read anew in each epoch.
    `model` reuses the compiled kernels of an earlier program of the same task. `capture` makes the runner of the steps,
    which works in place; by default it uses CUDA graphs if one GPU hosts all nodes.
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
        model: Stack | None = None,
        capture: Callable[[], StepRunner] | None = None,
    ) -> None:
        self._ahead = 0
        """Steps of the current epoch that were skipped before it began."""
        self.task, self.device, self._engine_factory = task, device, [engine] if engine else []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds spent so far on training, compiling, loading, and on blocks that callers time with `timed`."""
        networks = Networks(task, together(experiments), device)
        self.layout = networks.layout
        self.feed = Feed(task.data, device, networks.dtype, augment=experiments[0].augment, workers=workers)
        self._lay_out(experiments, [0] * len(experiments))
        networks.check_batches(self.feed.plan.sizes)
        can_capture = device.type == "cuda" and self.engine.waits_for_nobody and not task.effects.in_python
        if capture is None and can_capture and not recomputing:     # recomputing reads RNG states: not capturable
            capture = Captured
        self._capture = capture
        self._start = partial(networks.start, len(self.engine.nodes))
        self._begin(*self._start(), epochs=[0] * len(experiments))
        self._from_start = True
        """Whether all experiments began here, so that their first epoch can be repeated."""
        changed = self.steps * self.state.x.numel()
        self._fused = changed >= WORTH_FUSING
        long = capture is not None and changed >= WORTH_COMPILING
        self.model = model or networks.stack(recomputing=recomputing, long=long)
        if self._fused and device.type == "cuda":
            self.model.route.fuses = True
            by_kernel = getattr(self.feed.inputs, "by_kernel", False)
            if task.data.pad is None and not by_kernel:     # texts have other shapes in each batch
                self.feed.show = Fused(self.feed.show)
        self.evaluation = Evaluation(task, self.model, device, networks.dtype)

    def _lay_out(self, experiments: Sequence[Experiment], epochs: Sequence[int]) -> None:
        """Assign the rows to experiments."""
        self.experiments = together(experiments)
        self.partitions = [one.resolved.partition(self.task.data) for one in self.experiments]
        topologies = [one.resolved.topology_on(self.task.data) for one in self.experiments]
        self.bands = Bands(self.experiments, topologies, epochs, self.layout.shared, *self._engine_factory)
        self.engine = self.bands.engine
        self.weights = [None if one.shares is None else torch.from_numpy(one.shares) for one in topologies]
        """Weight of each node of an experiment, [n]; None if all count alike."""
        self.feed.assign(self.experiments, self.partitions, self.engine.nodes, epochs)
        self.bands.schedule(self.steps)

    def _begin(self, x: Tensor, buffers: dict[str, Tensor], epochs: list[int]) -> None:
        """Begin with these models, after these epochs, and with the algorithms' initial states."""
        self.state = ProgramState(x, buffers, x.new_zeros(len(x)), x.new_zeros(len(x)), epochs)
        self.bands.begin_at(x)
        self._runner = self._capture() if self._capture else None

    @property
    def _merged_buffers(self) -> Collection[Tensor]:
        """The buffers that merge@end averages with the models."""
        return self.state.buffers.values() if self.experiment.bn == "shared" else ()

    @property
    def experiment(self) -> Experiment:
        """The first experiment; use it only for fields that all experiments share."""
        return self.experiments[0]

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.feed.steps

    @property
    def finished(self) -> bool:
        """Whether all epochs of all experiments are done."""
        return min(self.state.epochs) >= self.experiment.epochs

    def due(self, run: int) -> bool:
        """Whether an experiment is to be tested now: after every `eval_every`-th epoch and after the last."""
        done, one = self.state.epochs[run], self.experiments[run]
        return done == one.epochs or (done < one.epochs and done % one.eval_every == 0)

    # -------------------------------------------------------------------------------------------- steps

    def train_epoch(self, after_step: Callable[[int], None] | None = None) -> list[Measures]:
        """Train every node here for one epoch; return the measures of each experiment.

        `after_step` is called with the number of completed steps, counted from the start of the run.
        """
        began, before = time.perf_counter(), sum(self.seconds.values())
        with self.timed("loading"):
            self.begin_epoch()
        compiling = self.compiling
        passed, examples = self._train_steps(after_step)
        self.state.epochs = [epochs + passed for epochs in self.state.epochs]
        done = [epochs * self.feed.steps_per_epoch for epochs in self.state.epochs]
        self.state.x = self.bands.merge(self.state.x, self._merged_buffers, done)
        if not self.finished:
            self.feed.draw(self.state.epochs)               # while a GPU still trains
        loss, right = self.sums()
        seconds = time.perf_counter() - began
        self.seconds["compiling"] += self.compiling - compiling
        self.seconds["training"] += seconds - (sum(self.seconds.values()) - before)
        return [
            {
                "epoch": self.state.epochs[r],
                "step": done[r],
                "lr": self.feed.schedules[r](min(done[r], self.steps)),
                "nodes": list(self.engine.nodes),
                "loss": [value / examples for value in loss[r]],
                **({"train_accuracy": [value / examples for value in right[r]]} if self.task.classifies else {}),
                "images_per_second": examples * self.bands.rows / seconds,
            }
            for r in range(len(self.experiments))
        ]

    def repeats_first_epoch(self) -> bool:
        """Whether the first epoch was computed wrong, and the program is at its start again (`Stack.must_repeat`).

        Over processes it cannot be repeated, since neighbours have its messages; the next epochs are then right.
        """
        if self.task.is_own and self._from_start and set(self.state.epochs) == {1}:
            step = self.feed.steps_per_epoch - 1
            self.feed.counter.fill_(step)
            batch = self.feed.batch(*self.feed.shapes[step])
            if self.model.must_repeat(self.state.x, self.state.buffers, *batch) and self.engine.waits_for_nobody:
                self._begin(*self._start(), epochs=[0] * len(self.experiments))
                return True
        return False

    def _train_steps(self, after_step: Callable[[int], None] | None) -> tuple[int, int]:
        """Train the steps of an epoch; return the number of epochs that have passed, and of examples in these steps.

        An engine that catches up with other processes skips steps, also beyond the end of the epoch. One that was away
        joins them in another epoch: what it has trained of the epoch before is not measured.
        """
        length, step, examples = self.feed.steps_per_epoch, self._ahead, 0
        self.feed.advance(step)
        while step < length:
            found = self.engine.catch_up(self.state.epochs[0] * length + step + 1, self.state.x)
            if found is not None:
                self.join(found[0] - 1, found[1])
                self.begin_epoch()
                self.feed.advance(self._ahead)
                step, examples = self._ahead, 0
            self.advance(step)
            examples += self.feed.plan.sizes[step]
            self.feed.advance(self.engine.skipped)
            step += 1 + self.engine.skipped
            if after_step is not None:
                after_step(self.state.epochs[0] * length + step)
        self._ahead = step % length
        return step // length, examples

    def begin_epoch(self) -> None:
        """Draw the epoch's batches and reset the sums."""
        self.feed.load(self.state.epochs)
        self.state.loss.zero_()
        self.state.right.zero_()

    def advance(self, step: int) -> None:
        """Run step 0, 1, … of the epoch."""
        t = [epochs * self.feed.steps_per_epoch + step + 1 for epochs in self.state.epochs]
        shape = self.feed.shapes[step]
        self.feed.read(step)
        with self.seeded(*t):
            if self._runner is None or self.model.has_effects:
                self._step(t, *shape, in_place=False)
            else:
                self.bands.refresh(t)
                self._runner((*self.bands.kind(t), shape), partial(self._step, t, *shape, in_place=True))

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
        """The gradients of all rows on the current batch; no state changes, though a model may write its weights."""
        shape = self.feed.shapes[int(self.feed.counter)]
        self.feed.read(int(self.feed.counter))
        return self.model.gradients(self.state.x.clone(), self.state.buffers, *self.feed.batch(*shape))

    def seeded(self, *t: int, always: bool = False) -> AbstractContextManager[None]:
        """Seed the random numbers of step t (dropout) from the seeds, the first node here and the experiments' steps.

        A resumed run draws the same numbers again. Another placement of nodes on processes, or another set of seeds
        trained together, draws other numbers from the same distribution. A model that does not draw needs no seed.
        """
        if not self.model.random and not always:
            return nullcontext()
        seeds = (one.seed for one in self.experiments)
        steps, elsewhere = dict.fromkeys(t), always or self.task.effects.draws_elsewhere
        return seeded(self.device, *seeds, self.engine.nodes[0], *steps, elsewhere=elsewhere)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of a block to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    @property
    def compiling(self) -> float:
        """Seconds spent on recording the steps of these rows."""
        return self._runner.seconds if isinstance(self._runner, Captured) else 0.0

    def _step(self, t: Sequence[int], size: int, *need: int, in_place: bool) -> None:
        """Run one step on the current batch, entirely on the device: step `t[r]` of experiment r."""
        state = self.state
        batch = self.feed.batch(size, *need)
        found = self.model.gradients(state.x, state.buffers, *batch)
        state.x = self.bands.step(
            state.x, self._clipped(found.g), t, self.feed.times, self.feed.rate(), self._full_gradient,
            partial(self._gradient, batch), in_place, self._fused,
        )
        if in_place:
            overwrite(list(state.buffers.values()), list(found.buffers.values()))
        else:
            state.buffers = found.buffers
        state.loss.add_(found.losses * size)
        state.right.add_(found.right * size)
        self.feed.advance()

    def _clipped(self, g: Tensor) -> Tensor:
        return g if self.experiment.clip is None else clipped(g, self.experiment.clip)

    def _gradient(self, batch: tuple[Tree, Tree], rows: slice, x: Tensor) -> Tensor:
        inputs, targets = (tree_map(lambda values: values[rows], part) for part in batch)
        return self._clipped(self._gradient_at(x, rows, inputs, targets))

    def _full_gradient(self, rows: slice, x: Tensor) -> Tensor:
        """The gradient over all examples of each node, without augmentation."""
        total, examples = torch.zeros_like(x), len(self.feed.plan.owners[0].examples)
        for positions, need in self.feed.everything:
            index = positions[rows]
            inputs, targets = self.feed.inputs.show(index, *need), self.feed.targets_at(index)
            total += self._gradient_at(x, rows, inputs, targets) * index.shape[1]
        return total / examples

    def _gradient_at(self, x: Tensor, rows: slice, inputs: Tree, targets: Tree) -> Tensor:
        """The gradient of some rows at models x; no buffer changes."""
        buffers = {name: value[rows] for name, value in self.state.buffers.items()}
        return self.model.gradients(x, buffers, inputs, targets, range(rows.start, rows.stop)).g

    # -------------------------------------------------------------------------------------------- tests

    def evaluate(self, runs: Sequence[int] | None = None) -> list[Measures]:
        """Test the models of all or some experiments, and their averages if all nodes are here."""
        chosen = range(len(self.experiments)) if runs is None else runs
        nodes, everybody = len(self.engine.nodes), len(self.engine.nodes) == self.engine.topology.n
        x, buffers = self.models(chosen, averages=everybody)
        owners = [*self.engine.nodes] * len(chosen) + [-1] * (len(x) - len(chosen) * nodes)
        steps = [self.state.epochs[run] * self.feed.steps_per_epoch for run in chosen]
        places = [run * nodes + at for run in chosen for at in range(nodes)] + [-1 - run for run in chosen]
        with self.seeded(*(TESTS + done for done in steps)):        # for models that draw random numbers in tests too
            tested = self.evaluation(x, buffers, owners, places)
        found: list[Measures] = []
        for k, run in enumerate(chosen):
            rows, sent = slice(k * nodes, (k + 1) * nodes), self.bands.bytes_sent(run, steps[k], self._merged_buffers)
            measures = tested.measures(rows)
            measures |= {"weight_norm": x[rows].norm(dim=-1).tolist(), "bytes_sent": [sent] * nodes}
            if everybody:
                averaged = tested.of_model(len(chosen) * nodes + k)
                measures |= measures_of_all(x[rows], averaged, self.weights[run])
            found.append(measures)
        return found

    def evaluate_average(self, rows: dict[str, Tensor], run: int) -> Measures:
        """The measures that need all models of a run; `rows` are the rows of all nodes, as returned by `rows_of`."""
        x, weights = rows["x"].to(self.device), self.weights[run]
        buffers = {name: average(of.to(self.device), 0, weights)[None] for name, of in buffers_of(rows).items()}
        averaged = self.evaluation(average(x, 0, weights)[None], buffers, [-1], [-1 - run]).of_model(0)
        return measures_of_all(x, averaged, weights)

    def models(self, runs: Sequence[int], averages: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """The models and buffers of some experiments' rows, followed by the mean over the nodes of each experiment."""
        everything = list(runs) == list(range(len(self.experiments)))
        known = [weights for run in runs if (weights := self.weights[run]) is not None]
        weights = torch.stack(known) if known else None     # of all or of none: a program has one kind

        def followed(values: Tensor) -> Tensor:
            by_run = values.view(len(self.experiments), len(self.engine.nodes), *values.shape[1:])
            by_run = by_run if everything else by_run[list(runs)]
            rows = by_run.flatten(0, 1)
            return torch.cat([rows, average(by_run, 1, weights)]) if averages else rows

        return followed(self.state.x), {name: followed(value) for name, value in self.state.buffers.items()}

    # ------------------------------------------------------------------------------------------ checkpoints

    def checkpoint(self, run: int) -> Checkpoint:
        """Everything that an experiment needs to resume."""
        return Checkpoint(
            self.rows_of(run), self.state.epochs[run], topology=self.experiments[run].resolved.external,
            route=type(self.model.route).__name__, device=self.device.type,
        )

    def rows_of(self, run: int) -> NamedRows:
        """The rows of an experiment: x, state and buffers."""
        rows = slice(run * len(self.engine.nodes), (run + 1) * len(self.engine.nodes))
        buffers = {name: value[rows] for name, value in self.state.buffers.items()}
        return named_rows(self.state.x[rows], self.bands.state_of(run), buffers)

    def join(self, steps: int, models: Tensor | None) -> None:
        """Continue as other processes do after this many steps, with these models, if given, and then new sums."""
        epochs, self._ahead = divmod(steps, self.feed.steps_per_epoch)
        self.state.epochs = [epochs] * len(self.experiments)
        self._from_start = False
        if models is not None:
            self.state.x = models
            self.bands.begin_at(models)

    def restore(self, saved: Sequence[Checkpoint]) -> None:
        """Resume all experiments from their checkpoints."""
        def stacked(values: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(values)).to(self.device)

        x, kept = stacked([one.rows["x"] for one in saved]), [buffers_of(one.rows) for one in saved]
        buffers = {name: stacked([of[name] for of in kept]) for name in self.state.buffers}
        self._begin(x, buffers, [one.epochs for one in saved])
        self._from_start = False
        self.bands.restore([state_of(one.rows) for one in saved], self.device)
        self.model.keep_route([one.route for one in saved if one.device == self.device.type])

    def regroup(
        self, experiments: Sequence[Experiment], saved: Sequence[Checkpoint | None], places: Sequence[int | None] = ()
    ) -> None:
        """Continue with these experiments, each from its checkpoint; None: from its start.

        `places` are their places so far, None for those that enter; none are known by default. The data, the compiled
        models and the kernels of the steps are used again.
        """
        with self.timed("loading"):
            earlier, self._runner = self.bands, None
            release(self.device)
            whole = [of or self._before(one) for one, of in zip(experiments, saved, strict=True)]
            self._lay_out(experiments, [one.epochs for one in whole])
            self.bands.take_kernels(earlier)
            self.restore(whole)
            nodes = len(self.engine.nodes)
            self.model.move([None if at is None else at * nodes + node for at in places for node in range(nodes)])

    def _before(self, experiment: Experiment) -> Checkpoint:
        """Checkpoint of an experiment before its first epoch."""
        x, buffers = Networks(self.task, [experiment], self.device).start(len(self.engine.nodes))
        return Checkpoint(named_rows(x, {}, buffers), 0)


def clipped(g: Tensor, largest: float) -> Tensor:
    """Scale each row whose norm exceeds `largest` down to it, as `torch.nn.utils.clip_grad_norm_` does.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    factor: Tensor = (largest / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
    return g * factor


class Networks:
    """A copy of the task's network for each experiment."""

    def __init__(self, task: Task, experiments: Sequence[Experiment], device: torch.device) -> None:
        self.task, self.device, self.precision = task, device, experiments[0].precision
        self.dtype = PRECISIONS[self.precision]
        self._modules = [task.module(one.seed, self.dtype) for one in experiments]
        self.layout = Layout.of_experiment(self._modules[0], experiments[0].bn)
        if device.type == "cpu":
            keep_freed_memory()

    def check_batches(self, sizes: Sequence[int]) -> None:
        """Raise InputError if a batch has one example, from which BatchNorm cannot compute a variance."""
        norms = nn.modules.batchnorm._BatchNorm
        if 1 not in sizes or not any(isinstance(part, norms) for part in self._modules[0].modules()):
            return
        module = copied(self._modules[0]).train()
        given, named = arguments(module, self.task.examples(1, self.dtype)[0])
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                module(*given, **named)
        except ValueError as error:
            raise InputError(
                f"a step has a batch of one example, which BatchNorm cannot normalise ({error}); use another batch size"
            ) from None

    def start(self, nodes: int) -> tuple[Tensor, Buffers]:
        """Initial x [rows, d] and buffers of all rows; all nodes of an experiment start from the same weights."""
        x, buffers = stacked_rows(self.layout, self._modules, nodes)
        return x.to(self.device), {name: value.to(self.device) for name, value in buffers.items()}

    def stack(self, *, recomputing: bool, long: bool) -> Stack:
        """All copies as one stack; see `Stack` for `long`."""
        def made() -> nn.Module:
            module = self.task.module(0, self.dtype).to(self.device)
            if recomputing:
                recompute(module)
            return module

        loss = self.task.loss
        if isinstance(loss, nn.Module):
            loss = converted(copy.deepcopy(loss), self.device, self.dtype)
        effects = self.task.effects
        route = OneByOne if effects.draws_elsewhere else Vectorised if effects.counts else None
        stack = Stack(
            made, loss, self.layout, self.precision, right=self.task.right, counts_hits=self.task.right is accuracy,
            long=long, route=route,
        )
        if effects.draws_elsewhere:
            name = type(stack.module).__name__
            log.warning(f"{name} draws random numbers of NumPy or Python; the models are trained {OneByOne.cost}")
        stack.random = stack.random or effects.draws or effects.draws_elsewhere
        return stack
