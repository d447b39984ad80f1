"""Processes agree on the epochs at which they save and stop, without exchanging messages."""

import random

import pytest

from quasiglobal.runs.saving import AgreedSaving, Saving

EPOCHS = 40


class FakeLoop:
    """The part of a loop that `Saving` uses."""

    def __init__(self):
        self.epoch, self.stopping = 0, False

    @property
    def over(self):
        return self.stopping or self.epoch == EPOCHS

    def stop(self):
        self.stopping = True


class Process:
    def __init__(self, folder, processes, steps, seconds):
        self.loop, self.noted, self.steps, self.done, self.saved = FakeLoop(), [], steps, 0, []
        self.saving = AgreedSaving(seconds, self.noted, folder, processes, steps)

    def step(self):
        self.done += 1
        if self.done % self.steps == 0:
            self.loop.epoch += 1
            if self.saving.now(self.loop):
                self.saved.append(self.loop.epoch)


def run(folder, processes, steps, seed, seconds=0.0, interrupted=None):
    """Run a ring of processes in random order; each is at most one step ahead of its neighbours."""
    draw, ring = random.Random(seed), [Process(folder, processes, steps, seconds) for _ in range(processes)]
    while going := [k for k, process in enumerate(ring) if not process.loop.over]:
        ready = [
            k for k in going
            if all(ring[(k + side) % processes].done >= ring[k].done or ring[(k + side) % processes].loop.over
                   for side in (-1, 1))
        ]
        chosen = draw.choice(ready)
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
    assert saved == [4, 8]
    assert loop.stopping
