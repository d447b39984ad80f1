import numpy as np
import pytest

import quasiglobal as qg
from quasiglobal.tasks.partition import dirichlet
from quasiglobal.tasks.randomness import epoch_order, generator

LABELS = np.random.default_rng(0).integers(0, 10, 5000)


@pytest.mark.parametrize("n", [1, 7, 10, 16, 32, 48])
@pytest.mark.parametrize("alpha", [0.1, 1, 10])
def test_parts_are_disjoint_equal_and_complete_up_to_the_remainder(n, alpha):
    parts = dirichlet(LABELS, n, alpha, seed=3)
    assert {len(part) for part in parts} == {len(LABELS) // n}
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything) == len(LABELS) // n * n


def test_a_partition_is_a_function_of_its_seed():
    def fingerprint(seed):
        return [part.tolist() for part in dirichlet(LABELS, 16, 0.1, seed)]

    assert fingerprint(0) == fingerprint(0) != fingerprint(1)


def entropy(parts):
    shares = np.array([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
    return -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1).mean()


def test_a_smaller_alpha_is_more_heterogeneous():
    by_alpha = [entropy(dirichlet(LABELS, 16, alpha, seed=0)) for alpha in (0.1, 1, 10)]
    assert by_alpha == sorted(by_alpha)
    assert by_alpha[0] < 1.2 < 2.1 < by_alpha[2] < np.log(10)


def test_bad_input():
    with pytest.raises(qg.InputError, match="alpha must be > 0, got 0"):
        dirichlet(LABELS, 4, 0, 0)
    with pytest.raises(qg.InputError, match="3 examples cannot be split among 4 nodes"):
        dirichlet(LABELS[:3], 4, 1, 0)


def test_randomness_depends_on_the_whole_key():
    draws = {tuple(generator(*key).integers(2**60, size=2)) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 0)]}
    assert len(draws) == 4
    assert sorted(epoch_order(0, 1, 2, 9)) == list(range(9))
    assert epoch_order(0, 1, 2, 99).tolist() != epoch_order(0, 1, 3, 99).tolist()
