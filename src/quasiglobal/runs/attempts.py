"""Attempts at a run. Where a lost process ends the run of all, they start again in another place of the store.

The store outlives the processes, and has the addresses and epochs of those that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quasiglobal.engines.costs import traffic
from quasiglobal.engines.distributed import MeanLost
from quasiglobal.peers.gloo import Meeting
from quasiglobal.peers.rendezvous import spread
from quasiglobal.runs.participant import Seat
from quasiglobal.training.experiment import Experiment


def needs_all(experiment: Experiment) -> bool:
    """Whether a process that was lost cannot come back: the algorithm needs exact means of all models."""
    return bool(traffic(experiment.resolved.algorithm).everybody)


def seat_in(experiment: Experiment, store: Meeting, rank: int, size: int) -> tuple[Meeting, Seat]:
    """The place in the store and the seat of process `rank` of `size`, in the first attempt that has not ended.

    A process that comes back to a run that needs all ends the attempt: the others cannot continue it either.
    """
    number = 0
    while True:
        place = Meeting(store, f"attempt/{number}")
        if not place.check(["ended"]):
            if not (place.check([f"epochs/{rank}"]) and needs_all(experiment)):
                hosted = spread(experiment.resolved.nodes, size)
                return place, Seat(place, rank, hosted, experiment.hash)
            end_attempt(place)
        number += 1


@contextmanager
def ending(place: Meeting) -> Iterator[None]:
    """End the attempt if a mean over all nodes has lost a process."""
    try:
        yield
    except MeanLost:
        end_attempt(place)
        raise


def end_attempt(place: Meeting) -> None:
    """Note that this attempt has ended for all processes."""
    with suppress(RuntimeError):                            # the store may be gone, and with it all attempts
        place.set("ended", "")
