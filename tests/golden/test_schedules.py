"""The released code's learning rate at every step of 300 epochs."""

import re
from pathlib import Path

import numpy as np
import pytest

import quasiglobal as qg
from quasiglobal.training.schedule import Schedule, scaled_lr

OFFICIAL = dict(np.load(Path(__file__).parent / "lr_schedules_official.npz"))


@pytest.mark.parametrize("key", OFFICIAL)
def test_every_step_has_the_released_learning_rate(key):
    nodes, factor = map(int, re.fullmatch(r"n(\d+)_factor(\d+)", key).groups())
    per_epoch = -(-50_000 // nodes // 32)
    schedule = Schedule(peak=scaled_lr(32, factor), steps=300 * per_epoch, warmup_steps=5 * per_epoch)
    ours = [schedule(t) for t in range(1, schedule.steps + 1)]
    # The released code adds and multiplies in another order: a few units in the last place of float64.
    np.testing.assert_allclose(ours, OFFICIAL[key], rtol=1e-13)


def test_a_small_peak_has_no_warm_up_and_no_milestones_means_constant():
    constant = Schedule(peak=0.05, steps=100, warmup_steps=10, milestones=())
    assert {constant(t) for t in range(1, 101)} == {0.05}


@pytest.mark.parametrize(("steps", "fraction", "last"), [(9, 0.5, 5), (11, 0.5, 6), (10, 0.5, 5), (90, 1 / 3, 30)])
def test_a_milestone_on_half_a_step_is_rounded_up(steps, fraction, last):
    schedule = Schedule(peak=0.05, steps=steps, milestones=(fraction,))
    assert [schedule(t) for t in range(1, steps + 1)] == [0.05] * last + [0.05 * 0.1] * (steps - last)


def test_bad_schedules_are_one_sentence():
    with pytest.raises(qg.InputError, match="lr must be > 0"):
        Schedule(peak=0.0, steps=10)
    with pytest.raises(qg.InputError, match="fractions of the run"):
        Schedule(peak=0.1, steps=10, milestones=(150,))
