"""Battery of checks for every algorithm, including your own."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal import algorithms, topology
from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.algorithms.base import NodeView
from quasiglobal.algorithms.needs import needs_of
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.links import misfit
from quasiglobal.engines.simulator import Simulator
from quasiglobal.errors import InputError
from quasiglobal.minimize import Diverged, Result, minimize
from quasiglobal.topology import Topology

TOLERANCE = 1e-10
"""Relative tolerance in float64: reordered sums differ by about 1e-14 after the battery's steps."""


class CheckFailed(AssertionError):
    """An algorithm violates rules that the engines rely on; the message lists each failed check with the reason."""


def check_algorithm(algorithm: str | Algorithm) -> list[str]:
    """Run the battery on an algorithm and return the names of the checks that it passed.

    Raise `CheckFailed` with all failed checks and the reasons.

    >>> import quasiglobal as qg
    >>> class Careless(qg.Algorithm):
    ...     def step(self, x, g, state, node):
    ...         return node.mix(x.sub_(node.lr * g)), state
    >>> qg.check_algorithm(Careless())
    Traceback (most recent call last):
    quasiglobal.checks.CheckFailed: Careless failed 1 of 12 checks
    - pure: step changed its input x in place; return new tensors
    """
    chosen = algorithms.algorithm(algorithm)
    failures: list[str] = []
    for name, check in CHECKS.items():
        try:
            check(chosen)
        except Unrepeatable as reason:
            failures.append(f"- {name}: {reason}; the checks after it compare runs, and were left out")
            break
        except Broken as reason:
            failures.append(f"- {name}: {reason}")
        except (Diverged, InputError) as error:
            failures.append(f"- {name}: {error}")
        except Exception as error:
            failures.append(f"- {name}: step raised {type(error).__name__}: {error}")
    if failures:
        head = f"{type(chosen).__name__} failed {len(failures)} of {len(CHECKS)} checks"
        raise CheckFailed("\n".join([head, *failures]))
    return list(CHECKS)


class Broken(Exception):
    """Reason why a check failed."""


class Unrepeatable(Exception):
    """Reason why the checks that compare runs would say nothing."""


@dataclass(frozen=True)
class Problem:
    """Heterogeneous quadratics: node i has its own centre and curvature."""

    centre: Tensor
    curvature: Tensor
    x0: Tensor

    def gradient(self, x: Tensor, t: int) -> Tensor:
        """Each node's gradient at its own x."""
        return self.curvature * (x - self.centre)


def _pairs(first: int) -> NDArray[np.float64]:
    """W in which nodes average in pairs, beginning with the pair (first, first + 1)."""
    pairs = np.roll(np.kron(np.eye(3), np.full((2, 2), 0.5)), (first, first), axis=(0, 1))
    return np.asarray(pairs)


GRAPHS = (topology.ring(N := 6).lazy(), topology.equidyn(N))
"""A fixed symmetric graph that meets every method's needs of W, and a directed graph that is drawn at each step."""

DIRECTED = (GRAPHS[0], topology.one_peer_exponential(N))
"""The same, and a directed, time-varying graph that repeats, for messages per edge."""

UNDIRECTED = (GRAPHS[0], topology.from_matrices([_pairs(0), _pairs(1)]))
"""The same, and a time-varying graph: each node with its left neighbour, then with its right neighbour."""

TREES = (topology.from_graph(nx.path_graph(N)), topology.from_graph(nx.full_rary_tree(2, N)))
"""A chain and a binary tree."""


def graphs(algorithm: Algorithm) -> tuple[Topology, ...]:
    """The graphs to check an algorithm on, all of which it accepts."""
    needs = algorithm.needs
    if needs.tree or needs.undirected:
        return TREES if needs.tree else UNDIRECTED
    try:
        per_edge = traffic(algorithm).per_edge
    except Exception:                                       # the checks say what is broken
        per_edge = False
    return tuple(graph for graph in (DIRECTED if per_edge else GRAPHS) if misfit(needs, graph) is None)


STEPS = 30
"""Enough for two of SlowMo's rounds of 12 steps."""


def problem(seed: int = 0, n: int = N, d: int = 5, dtype: torch.dtype = torch.float64) -> Problem:
    """Draw a problem from a seed; all nodes have the same x0."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(n, d, generator=generator, dtype=torch.float64)
    curvature = 0.5 + torch.rand(n, d, generator=generator, dtype=torch.float64)
    x0 = torch.randn(d, generator=generator, dtype=torch.float64).expand(n, d)
    return Problem(centre.to(dtype), curvature.to(dtype), x0.to(dtype))


def rate(t: int) -> float:
    """Learning-rate schedule that decays at half of the steps."""
    return 0.05 if t <= STEPS // 2 else 0.005


def run(algorithm: Algorithm, p: Problem, graph: Topology, **options: Any) -> Result:
    """Run `STEPS` steps with the decaying rate; ignore warnings about the algorithm's requirements on W."""
    settings: dict[str, Any] = {"lr": rate, "steps": STEPS} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minimize(p.gradient, p.x0, algorithm, graph, **settings)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by more than rounding."""
    scale = max(1.0, float(a.abs().max()))
    return not bool(((a - b).abs() <= TOLERANCE * scale).all())


def check_shapes(algorithm: Algorithm) -> None:
    """State has a row per node, and x and state keep their names, shapes and types."""
    p, graph = problem(dtype=torch.float32), graphs(algorithm)[0]
    before = {name: (value.shape, value.dtype) for name, value in Simulator(graph).begin(algorithm, p.x0).items()}
    result = run(algorithm, p, graph)
    for name, value in result.state.items():
        if value.shape[0] != N:
            raise Broken(f"state {name!r} has shape {list(value.shape)}; give it one row per node")
    after = {name: (value.shape, value.dtype) for name, value in result.state.items()}
    if before != after:
        changed = sorted(set(before.items()) ^ set(after.items()), key=str)[0][0]
        raise Broken(f"state {changed!r} changes its name, shape or type between init and step")
    if (result.x.shape, result.x.dtype) != (p.x0.shape, p.x0.dtype):
        raise Broken(f"x became {list(result.x.shape)} of {result.x.dtype}; keep the shape and type of x")


class WatchingSimulator(Simulator):
    """Simulator that detects in-place changes of a step's inputs."""

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        given = {"x": x, "g": g} | {f"state {name!r}": value for name, value in state.items()}
        before = {name: value.clone() for name, value in given.items()}
        entries = dict(state)
        result = super().advance(algorithm, x, g, state, node)
        for name, value in given.items():
            if not value.equal(before[name]):
                raise Broken(f"step changed its input {name} in place; return new tensors")
        if state.keys() != entries.keys() or any(state[name] is not entries[name] for name in entries):
            raise Broken("step changed the dict `state`; return a new one")
        return result


def check_pure(algorithm: Algorithm) -> None:
    """`step` mutates nothing, and the same run gives the same result again: whatever is drawn is drawn from a key."""
    for graph in graphs(algorithm):
        first = run(algorithm, problem(), graph, engine=WatchingSimulator(graph))
        if not first.history.equal(run(algorithm, problem(), graph).history):
            raise Unrepeatable(
                "the same run gives another result: step draws random numbers, or keeps memory outside of the state; "
                "draw nodes by node.sample and coins by node.mix_sometimes, and keep all memory in state"
            )


class OverwritingSimulator(Simulator):
    """Simulator that overwrites a step's inputs after the step, as an engine with captured graphs does."""

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        lent_x, lent_g = x.clone(), g.clone()
        lent_state = {name: value.clone() for name, value in state.items()}
        new_x, new_state = super().advance(algorithm, lent_x, lent_g, lent_state, node)
        kept = new_x.clone(), {name: value.clone() for name, value in new_state.items()}
        for lent in (lent_x, lent_g, *lent_state.values()):
            lent.fill_(torch.nan)
        return kept


def check_storage(algorithm: Algorithm) -> None:
    """The result is correct under an engine that overwrites x, g and state in place."""
    for graph in graphs(algorithm):
        plain = run(algorithm, problem(), graph)
        try:
            overwritten = run(algorithm, problem(), graph, engine=OverwritingSimulator(graph))
        except Diverged:
            raise Broken("step keeps a tensor outside of x and state; put it into the state") from None
        if not plain.history.equal(overwritten.history):
            raise Broken("the result depends on storage that the engine overwrote; keep all memory in state")


def check_resume(algorithm: Algorithm) -> None:
    """x and state hold all memory: a resumed run is bit-equal to an uninterrupted one."""
    for graph in graphs(algorithm):
        whole = run(algorithm, problem(), graph)
        for stop in (1, 7, STEPS // 2):
            half = run(algorithm, problem(), graph, steps=stop)
            run(algorithm, problem(1), graph, steps=3)      # overwrites memory outside x and state
            rest = run(algorithm, problem(), graph, resume=half)
            if not whole.history.equal(rest.history):
                raise Broken(f"resuming after step {stop} gives another result; keep all memory in state")


class PhaseSimulator(Simulator):
    """Simulator that passes the first t of a phase to all steps of the phase, as a captured graph would."""

    first: dict[Hashable, int]

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        self.first = getattr(self, "first", {})
        shown = self.first.setdefault(algorithm.phase(node.t), node.t)
        return super().advance(algorithm, x, g, state, _At(node, shown))


class _At(NodeView):
    def __init__(self, node: Node, shown: int) -> None:
        super().__init__(node)
        self.shown = shown

    @property
    def t(self) -> int:
        return self.shown


def check_phase(algorithm: Algorithm) -> None:
    """Control flow depends on t only through `phase(t)`."""
    for graph in graphs(algorithm):
        plain = run(algorithm, problem(), graph)
        if not plain.history.equal(run(algorithm, problem(), graph, engine=PhaseSimulator(graph)).history):
            raise Broken("step branches on node.t in a way that phase(t) does not cover; override phase")


ORDER = torch.tensor([3, 0, 5, 1, 4, 2])


class RenamingSimulator(Simulator):
    """Simulator whose node i is node ORDER[i] of the original, also when nodes are sampled at random."""

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        return super().sample(fraction, draw)[ORDER]


def _renamed(graph: Topology, t: int) -> Any:
    """W(t) of the graph with permuted nodes."""
    return graph.weights(t)[ORDER.numpy()][:, ORDER.numpy()]


def check_permutation(algorithm: Algorithm) -> None:
    """Permuting the nodes permutes the result."""
    p = problem()
    permuted = Problem(p.centre[ORDER], p.curvature[ORDER], p.x0[ORDER])
    for graph in graphs(algorithm):
        matrices = [_renamed(graph, t) for t in range(1, (graph.period or STEPS) + 1)]
        renamed = topology.from_matrices(matrices)
        result = run(algorithm, permuted, renamed, engine=RenamingSimulator(renamed))
        if differ(run(algorithm, p, graph).history[:, ORDER], result.history):
            raise Broken("the result depends on the order of the nodes; combine rows by mix and mean only")


def check_mean(algorithm: Algorithm) -> None:
    """If `keeps_mean`, the nodes' mean does not change while g = 0 and W is doubly stochastic."""
    p = problem()
    still = Problem(p.centre, torch.zeros_like(p.curvature), p.centre)
    for graph in graphs(algorithm):
        means = run(algorithm, still, graph).history.mean(dim=1)
        if needs_of(algorithm).keeps_mean and differ(means, means[:1].expand_as(means)):
            raise Broken("the nodes' mean moves though g = 0; mix each update of x, or set Needs(keeps_mean=False)")


def check_consensus(algorithm: Algorithm) -> None:
    """If an algorithm `rests`, nodes with equal x and zero gradients do not move, also if messages are lost."""
    if not needs_of(algorithm).rests:
        return
    p = problem()
    still = Problem(p.centre, torch.zeros_like(p.curvature), p.x0)
    refused = algorithm.needs.loss == "refused" or traffic(algorithm).means      # a mean needs every message
    losses = (0.0,) if refused else (0.0, 0.3)
    for graph, drop in itertools.product(graphs(algorithm), losses):
        history = run(algorithm, still, graph, engine=Simulator(graph, drop=drop)).history
        if differ(history, history[:1].expand_as(history)):
            when = "; after lost messages, use the mask of what came" if drop else ""
            raise Broken(f"x drifts though all nodes agree and g = 0{when}")


def check_runs(algorithm: Algorithm) -> None:
    """Two runs in one program, each with its own learning rate, give the same results as separate runs."""
    first, second = problem(0), problem(1)
    both = Problem(*(torch.cat(pair) for pair in zip(_parts(first), _parts(second), strict=True)))
    factors = torch.tensor([1.0, 0.5], dtype=torch.float64).repeat_interleave(N)[:, None]
    for graph in graphs(algorithm):
        engine = Simulator(graph, seeds=(3, 4))
        rows = run(algorithm, both, graph, engine=engine, lr=lambda t: rate(t) * factors).history
        for k, (p, seed) in enumerate(((first, 3), (second, 4))):
            factor = float(factors[k * N, 0])
            alone = run(algorithm, p, graph, seed=seed, lr=partial(_scaled, factor)).history
            if differ(rows[:, k * N : (k + 1) * N], alone):
                raise Broken("runs that share a program disturb each other; reduce along dim=-1 only")


def check_rates(algorithm: Algorithm) -> None:
    """The learning rate may be a scalar, [k, 1], or [1, d] for parameter groups."""
    p, graph = problem(), graphs(algorithm)[0]
    plain = run(algorithm, p, graph).history
    for ones in (torch.ones_like(p.x0[:, :1]), torch.ones_like(p.x0[:1])):
        if differ(plain, run(algorithm, p, graph, lr=lambda t, ones=ones: rate(t) * ones).history):
            raise Broken(f"a learning rate of shape {list(ones.shape)} changes the result; let it broadcast")
    alike = Problem(*(part[:, :1].repeat(1, 2) for part in _parts(p)))
    groups = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    slow, fast = (run(algorithm, alike, graph, lr=partial(_scaled, f)).history for f in (0.5, 1.0))
    ways = run(algorithm, alike, graph, lr=lambda t: rate(t) * groups).history
    if differ(slow, fast) and not differ(ways[..., 0], ways[..., 1]):
        raise Broken("parameters with different learning rates move alike; let node.lr broadcast to x")


def check_zero_rate(algorithm: Algorithm) -> None:
    """A learning rate of 0 works unless `divides_by_lr` is True."""
    if needs_of(algorithm).divides_by_lr:
        return
    try:
        run(algorithm, problem(), graphs(algorithm)[0], lr=lambda t: rate(t) * (t < STEPS // 2))
    except Diverged:
        raise Broken("step divides by node.lr; set Needs(divides_by_lr=True)") from None


def check_one_node(algorithm: Algorithm) -> None:
    """A single node without neighbours works."""
    run(algorithm, problem(n=1), topology.complete(1))


def _parts(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return p.centre, p.curvature, p.x0


def _scaled(factor: float, t: int) -> float:
    return factor * rate(t)


CHECKS: dict[str, Callable[[Algorithm], None]] = {
    "shapes": check_shapes,
    "pure": check_pure,
    "storage": check_storage,
    "resume": check_resume,
    "phase": check_phase,
    "permutation": check_permutation,
    "mean": check_mean,
    "consensus": check_consensus,
    "runs": check_runs,
    "rates": check_rates,
    "zero rate": check_zero_rate,
    "one node": check_one_node,
}
"""The battery, in the order it runs."""
