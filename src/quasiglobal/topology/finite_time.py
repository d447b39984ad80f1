"""Graphs that change from step to step and, after a finite number of steps, have averaged exactly."""

from __future__ import annotations

import math
from functools import cache
from itertools import chain

import numpy as np

from quasiglobal.errors import InputError
from quasiglobal.topology.mixing import Matrix
from quasiglobal.topology.topology import Topology, check_nodes, check_range

__all__ = ["base", "one_peer_exponential"]

MOST_NODES = 3000
"""Maximum number of nodes of `base`: beyond it, the dense matrices of a period take gigabytes."""

Groups = list[list[int]]
"""Groups of nodes that average among themselves in a step; nodes in no group keep their models."""


def one_peer_exponential(n: int) -> Topology:
    """At step t, node i averages only with node i − 2^((t − 1) mod p), p = ⌈log₂ n⌉; exact for n = 2^p.

    M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic gradient push for distributed deep learning.
    ICML 2019.
    """
    check_nodes("one-peer-exponential", n, 2, "complete(1)")
    hops = [2**k for k in range(math.ceil(math.log2(n)))]
    matrices = tuple((np.eye(n) + np.roll(np.eye(n), hop, axis=0)) / 2 for hop in hops)
    return Topology(f"one-peer-exponential:{n}", matrices)


def base(n: int, peers: int) -> Topology:
    """Base-(k + 1) graph: exact after few steps for any n, with at most k = `peers` peers in each step.

    Y. Takezawa, R. Sato, H. Bao, K. Niwa, M. Yamada: Beyond exponential graph: communication-efficient topologies for
    decentralized learning via finite-time convergence. NeurIPS 2023.

    Nodes whose number is a product of factors ≤ k + 1 average in groups, one factor per step. Other numbers are a sum
    of such blocks, written in base k + 1 (`_simple_base`). A product of both is averaged in the groups of its smooth
    part first, if that is shorter. More peers than n − 1 count as n − 1.

    >>> [base(n, 1).exact_after for n in (5, 6, 7, 8)]
    [5, 4, 5, 3]
    """
    check_nodes("base", n, 2, "complete(1)")
    check_range("base", "a number of peers", peers, 1, MOST_NODES)
    if n > MOST_NODES:
        raise InputError(f"base has at most {MOST_NODES:,} nodes here, got {n:,}: its period is many dense matrices")
    radix = min(peers, n - 1) + 1
    smooth = _smooth_part(n, radix)
    parted = [np.asarray(np.kron(np.eye(n // smooth), W)) for W in _simple_base(smooth, radix)]
    parted += [np.asarray(np.kron(W, np.eye(smooth))) for W in _simple_base(n // smooth, radix)]
    direct = _simple_base(n, radix)
    return Topology(f"base:{n}:{peers}", tuple(direct if len(direct) < len(parted) else parted))


def _simple_base(n: int, radix: int) -> list[Matrix]:
    """The simple Base-(k + 1) graph (Algorithm 2 of the paper), radix = k + 1.

    n = Σ_l a_l radix^{p_l}, p_1 > p_2 > …: block l has a_l parts of radix^{p_l} nodes.
    1. Each block averages: its nodes have the block's mean.
    2. In step l, each node of the later blocks exchanges with one node in each part of block l, with such a weight that
       the mean of each part, and that of all later blocks together, is then the mean of all nodes.
    3. Each part averages, as soon as its block has done its exchanges.
    """
    if _factors(n, radix) is not None:
        return [_average(np.eye(n), groups) for groups in _hypercubes([list(range(n))], radix)]
    blocks = _blocks(n, radix)
    inside = [_hypercubes([list(chain(*parts))], radix) for parts in blocks]
    parted = [_hypercubes(parts, radix) for parts in blocks]
    matrices = []
    for m in range(-len(inside[0]), 1 + len(parted[0])):    # 1. before 0; then block m is at 2., earlier ones at 3.
        W = np.eye(n)
        for block, parts in enumerate(blocks):
            later = list(chain(*chain(*blocks[block + 1 :])))
            if m < 0:
                _average(W, _in_turn(inside[block], m))
            elif block == m and later:
                size = sum(map(len, parts))
                _exchange(W, parts, later, size / (size + len(later)) / len(parts))
                _average(W, [part[at : at + radix] for part in parts for at in range(len(later), len(part), radix)])
            elif block <= m:
                _average(W, _in_turn(parted[block], m))
        matrices.append(W)
    return matrices


def _blocks(n: int, radix: int) -> list[Groups]:
    """The nodes 0 … n − 1 in blocks of a ⋅ radix^p nodes, largest first, each as a parts of radix^p nodes."""
    blocks, first = [], 0
    for power in reversed(range(n.bit_length())):
        size = radix**power
        parts = [list(range(at, at + size)) for at in range(first, n - size + 1, size)]
        first += size * len(parts)
        blocks += [parts] if parts else []
    return blocks


def _hypercubes(blocks: Groups, most: int) -> list[Groups]:
    """The steps of a hyper-hypercube in each of several blocks of equal size: step q averages over f_q nodes."""
    steps, stride = [], 1
    for factor in _factors(len(blocks[0]), most) or ():
        cubes = [np.reshape(block, (-1, factor, stride)) for block in blocks]
        steps.append([group for cube in cubes for group in cube.swapaxes(1, 2).reshape(-1, factor).tolist()])
        stride *= factor
    return steps


@cache
def _factors(n: int, most: int) -> tuple[int, ...] | None:
    """The fewest factors from 2 to `most` with the product n; None if there are none."""
    if n == 1:
        return ()
    divisors = (factor for factor in range(min(n, most), 1, -1) if n % factor == 0)
    found = [(factor, *rest) for factor in divisors if (rest := _factors(n // factor, most)) is not None]
    return min(found, key=len, default=None)


def _smooth_part(n: int, most: int) -> int:
    """The largest divisor of n whose prime factors are at most `most`.

    >>> _smooth_part(24 * 35, 5)
    120
    """
    return max(divisor for divisor in range(1, n + 1) if n % divisor == 0 and _factors(divisor, most) is not None)


def _in_turn(steps: list[Groups], m: int) -> Groups:
    """Step m of a hyper-hypercube that repeats; its steps may begin anywhere, since they commute."""
    return steps[m % len(steps)] if steps else []


def _average(W: Matrix, groups: Groups) -> Matrix:
    """W in which the nodes of each group average."""
    for group in groups:
        W[np.ix_(group, group)] = 1 / len(group)
    return W


def _exchange(W: Matrix, parts: Groups, later: list[int], weight: float) -> None:
    """Let each of the later nodes exchange with one node of each part."""
    for part in parts:
        for u, v in zip(part, later, strict=False):
            W[u, v] = W[v, u] = weight
            W[[u, v], [u, v]] -= weight
