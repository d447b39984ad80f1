"""Processes agree on the epochs at which they save and stop, without exchanging messages."""

import random

import pytest

from quasiglobal.common.files import alone
from quasiglobal.errors import InputError
from quasiglobal.runs.checkpoints import Part
from quasiglobal.runs.distributed import tidied
from quasiglobal.runs.saving import AgreedSaving, Saving, plan_path
from quasiglobal.runs.store import RunFolder
from quasiglobal.training.experiment import Experiment

EPOCHS = 40


class FakeLoop:
    """The part of a loop that `Saving` uses."""

    def __init__(self):
        self.epoch, self.stopping = 0, False

    @property
    def over(self):
        return self.stopping or self.epoch == EPOCHS

    def interrupt(self):
        self.stopping = True


class Process:
    def __init__(self, folder, apart, steps, seconds):
        self.loop, self.noted, self.steps, self.done, self.saved = FakeLoop(), [], steps, 0, []
        self.saving = AgreedSaving(seconds, self.noted, folder, apart, steps)

    def step(self):
        self.done += 1
        if self.done % self.steps == 0:
            self.loop.epoch += 1
            if self.saving.now(self.loop):
                self.saved.append(self.loop.epoch)


def run(folder, processes, steps, seed, seconds=0.0, interrupted=None, period=1):
    """Run a ring of processes in random order; each waits for its neighbours at every step that `period` divides."""
    draw = random.Random(seed)
    ring = [Process(folder, processes * period, steps, seconds) for _ in range(processes)]

    def ready(k):
        beside = [ring[(k + side) % processes] for side in (-1, 1)]
        waits = (ring[k].done + 1) % period == 0
        return not waits or all(other.done >= ring[k].done or other.loop.over for other in beside)

    while going := [k for k, process in enumerate(ring) if not process.loop.over]:
        ready_now = [k for k in going if ready(k)]
        chosen = draw.choice(ready_now)
        ring[chosen].step()
        if interrupted is not None and ring[chosen].done == interrupted:
            ring[chosen].noted.append(2)
    return ring


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("processes", [2, 3, 8])
def test_all_save_after_the_same_epochs(tmp_path, processes, steps):
    for seed in range(5):
        ring = run(tmp_path / str(seed), processes, steps, seed, seconds=1e-9)
        assert {tuple(process.saved) for process in ring} == {tuple(ring[0].saved)}
        assert ring[0].saved[-1] == EPOCHS
        assert len(ring[0].saved) > 2, "saves not only after the last epoch"


@pytest.mark.parametrize("processes", [2, 5])
def test_ctrl_c_at_any_of_them_stops_all_after_the_same_epoch(tmp_path, processes):
    for seed in range(5):
        ring = run(tmp_path / str(seed), processes, 3, seed, seconds=1e9, interrupted=20)
        assert {tuple(process.saved) for process in ring} == {tuple(ring[0].saved)}
        (last,) = ring[0].saved
        assert 20 // 3 < last < EPOCHS
        assert all(process.loop.stopping for process in ring)


@pytest.mark.parametrize("period", [2, 9])
def test_local_steps_let_processes_drift_apart_and_they_still_agree(tmp_path, period):
    for seed in range(5):
        ring = run(tmp_path / str(seed), 3, 3, seed, seconds=1e9, interrupted=20, period=period)
        assert {tuple(process.saved) for process in ring} == {tuple(ring[0].saved)}
        assert ring[0].saved[0] < EPOCHS


def test_if_processes_may_be_far_apart_the_measured_epochs_decide(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    ahead = Part(tmp_path, 1, [1])
    ahead.begin(0)
    for epoch in range(1, 31):
        ahead.write({"epoch": epoch})
    process = Process(tmp_path, 4 * 10_000, 10, seconds=1e9)
    process.noted.append(2)
    while not process.loop.over:
        now[0] += 0.125
        process.step()
    assert process.saved == [33], "more than two seconds, 1.25 an epoch, after the process that is ahead"


def test_a_second_command_leaves_the_files_of_a_run_that_trains(tmp_path):
    run = RunFolder.of(Experiment(topology="ring:4"), tmp_path)
    Part(run.folder, 0, [0, 1, 2, 3]).begin(0)
    plan_path(run.folder).write_text("{}")
    with alone(run.folder, shared=True):
        assert "is being trained by another process" in tidied([run], [(0, 1), (2, 3)])
        with pytest.raises(InputError, match="is being trained by another process"):
            run.newest_locked()
    assert plan_path(run.folder).exists()
    assert tidied([run], [(0, 1), (2, 3)]) == ""
    assert not (run.folder / "parts").exists()


def test_with_no_seconds_between_every_epoch_is_saved(tmp_path):
    assert run(tmp_path, 3, 2, 0)[1].saved == list(range(1, EPOCHS + 1))


def test_a_node_on_its_own_goes_by_its_own_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    loop, noted = FakeLoop(), []
    saving = Saving(10.0, noted)
    saved = []
    for epoch in range(1, 9):
        loop.epoch, now[0] = epoch, 3.0 * epoch
        if epoch == 8:
            noted.append(2)
        if saving.now(loop):
            saved.append(epoch)
    assert saved == [3, 6, 8], "before a checkpoint is 10 s old, and at the end"
    assert loop.stopping


def test_checkpoints_that_take_long_are_rare(monkeypatch):
    """Epochs of 3 s; a checkpoint takes 1 s, so that 20 s pass before the next, and then 0.1 s."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    loop, saving, saved = FakeLoop(), Saving(10.0, []), []
    for epoch in range(1, 25):
        loop.epoch = epoch
        now[0] += 3.0
        if saving.now(loop):
            saved.append(epoch)
            with saving.timed():
                now[0] += 1.0 if epoch < 10 else 0.1
    assert saved == [3, 9, 15, 18, 21, 24]
    every = Saving(0.0, [])
    with every.timed():
        now[0] += 100.0
    assert every.now(loop)


def test_a_run_that_ends_does_not_delay_the_checkpoints_of_the_others(monkeypatch):
    """It is saved at once, between their checkpoints."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    loop, saving = FakeLoop(), Saving(10.0, [])
    for epoch, due in ((1, False), (2, False), (3, True)):
        loop.epoch, now[0] = epoch, 3.0 * epoch
        assert saving.now(loop) == due
        with saving.timed():
            pass
