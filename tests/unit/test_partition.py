import numpy as np
import pytest
import torch

import quasiglobal as qg
from quasiglobal.common.randomness import generator
from quasiglobal.data.batches import Owner, Plan
from quasiglobal.data.partition import class_counts, digest_of_parts, dirichlet, heterogeneity, split

LABELS = np.random.default_rng(0).integers(0, 10, 5000)


@pytest.mark.parametrize("n", [1, 7, 10, 16, 32, 48])
@pytest.mark.parametrize("alpha", [0.1, 1, 10])
def test_parts_are_disjoint_equal_and_complete_up_to_the_remainder(n, alpha):
    parts = dirichlet(LABELS, n, alpha, seed=3)
    assert {len(part) for part in parts} == {len(LABELS) // n}
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything) == len(LABELS) // n * n


def test_a_partition_is_a_function_of_its_seed():
    def parts(seed):
        return [part.tolist() for part in dirichlet(LABELS, 16, 0.1, seed)]

    assert parts(0) == parts(0) != parts(1)


def test_bad_input(monkeypatch):
    monkeypatch.setattr("quasiglobal.data.partition.REDRAWS", 100)
    cases = {
        "alpha must be > 0, got 0": (LABELS, 4, "dirichlet", 0),
        "3 examples cannot be split among 4 nodes": (LABELS[:3], 4, "iid"),
        "did you mean 'dirichlet'": (LABELS, 4, "dirichlett"),
        "shards needs the number of shards per node, as in shards:2, got ''": (LABELS, 4, "shards"),
        "shards needs the number of shards per node, as in shards:2, got '9999": (LABELS, 4, "shards:" + "9" * 5000),
        "as in shards:2, got '²'": (LABELS, 4, "shards:²"),
        "too few for 8000 shards": (LABELS, 4, "shards:2000"),
        "unknown column 'site'; there is none": (LABELS, 4, "by:site"),
        "take a larger alpha": (np.zeros(100, dtype=np.int64), 10, "dirichlet", 0.001),
    }
    for words, arguments in cases.items():
        with pytest.raises(qg.InputError, match=words):
            split(*arguments)


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-plain", "iid", "shards:2"])
def test_every_kind_is_disjoint_and_equal(kind):
    parts = split(LABELS, 7, kind, alpha=0.5, seed=1)
    everything = np.concatenate(parts)
    assert len({len(part) for part in parts}) == 1
    assert len(np.unique(everything)) == len(everything) > 0.99 * len(LABELS)
    assert digest_of_parts(parts) == digest_of_parts(split(LABELS, 7, kind, alpha=0.5, seed=1))
    assert digest_of_parts(parts) != digest_of_parts(split(LABELS, 7, kind, alpha=0.5, seed=2))


def test_natural_clients_keep_their_own():
    site = np.array(["b", "a", "b", "c", "a", "b"])
    parts = split(np.zeros(6, dtype=np.int64), 3, "by:site", columns={"site": site})
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]
    with pytest.raises(qg.InputError, match="has 3 values, but there are 2 nodes"):
        split(np.zeros(6, dtype=np.int64), 2, "by:site", columns={"site": site})


def test_shards_limit_the_classes_of_a_node():
    counts = class_counts(split(LABELS, 10, "shards:2"), LABELS, 10)
    assert (counts > 0).sum(axis=1).max() <= 4


def test_heterogeneity_orders_the_partitions():
    def measured(kind, alpha=1.0):
        return heterogeneity(class_counts(split(LABELS, 16, kind, alpha), LABELS, 10))

    entropies, distances = zip(*(measured("dirichlet", alpha) for alpha in (0.1, 1, 10)), strict=True)
    assert list(entropies) == sorted(entropies)
    assert list(distances) == sorted(distances, reverse=True)
    assert measured("iid")[0] > entropies[-1]
    assert measured("dirichlet-plain", 1.0)[0] < entropies[1]


def test_randomness_depends_on_the_whole_key():
    draws = {tuple(generator(*key).integers(2**60, size=2)) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 0)]}
    assert len(draws) == 4
    def order(epoch, size):
        plan = Plan([Owner(0, 1, np.arange(size))], batch=size)
        return plan.epoch(epoch, torch.device("cpu")).index.flatten().tolist()

    assert sorted(order(2, 9)) == list(range(9))
    assert order(2, 99) != order(3, 99)
