"""A single node with its own data (`qg node`), in a federation of sites or at a rendezvous."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from quasiglobal.engines.trust import SUGGESTED
from quasiglobal.errors import InputError
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.peers.rendezvous import Meeting, meet, spread
from quasiglobal.peers.sites import Audit, SiteOpener
from quasiglobal.runs.agreement import agreement, check_node, own_task, refuse_between_sites, trust_of
from quasiglobal.runs.callbacks import TensorBoard
from quasiglobal.runs.options import Options
from quasiglobal.runs.participant import Participant, Seat, ending, seat_in
from quasiglobal.runs.prometheus import Prometheus
from quasiglobal.runs.result import give, has_result, offer, take
from quasiglobal.runs.store import Run, RunFolder, Watcher, unchanged_folders, unwatched
from quasiglobal.training.experiment import Experiment

log = logging.getLogger("quasiglobal")

AUDIT = "audit.jsonl"
"""File in a run folder with the connections of a site."""


@dataclass(frozen=True)
class InFederation:
    """A site's folder, and its own HOST:PORT to listen at if neighbours reach it by another one."""

    folder: Path
    listen: str | None = None


@dataclass(frozen=True)
class AtRendezvous:
    """The node's number, and the HOST:PORT of a store, for nodes in one cluster."""

    node: int
    address: str


MeetingPlace = InFederation | AtRendezvous


def train_node(
    experiment: Experiment,
    place: MeetingPlace,
    data: str,
    options: Options,
    patience: float,
    watch: Watcher = unwatched,
    metrics: str | None = None,
    linger: float = 0.0,
) -> Run:
    """Train one node on its own data, with the neighbours that connect within `patience` seconds.

    `metrics` is the PORT or HOST:PORT where Prometheus finds them. In a federation, neighbours that missed the end can
    fetch the model for `linger` seconds, and a node whose neighbours have all ended fetches the model of one of them.
    """
    site = place if isinstance(place, InFederation) else None
    experiment, node = agreement(experiment), _number(place)
    n = check_node(experiment, node)
    (run,) = unchanged_folders(experiment, options)
    experiment = run.experiment
    if site:
        refuse_between_sites(experiment)
    options = replace(options, trust=trust_of(experiment, options.trust, SUGGESTED if site else math.inf))
    if run.read_summary() is not None:
        if site:
            give(run.read(), _opener(site, run), None, options.peer_timeout, linger)
        return run.read()
    task = own_task(experiment, data)
    with ExitStack() as around:
        mine = Participant(task, [run], _seat(place, run, node, n, patience, around), options)
        page = Prometheus(mine.engine, experiment.epochs, SiteFolder(site.folder) if site else None)
        around.enter_context(mine.locked())
        if metrics is not None:
            around.enter_context(page.served(metrics))
        log.info("run folder: %s", run.folder)
        fetches, missing = site is not None and has_result(experiment), []
        if fetches:
            offer(mine)
        if max(mine.saved) >= experiment.epochs:            # an earlier start has trained to the end
            mine.resume(experiment.epochs)
        else:
            mine.connect(patience, max(mine.saved))
            if fetches and mine.engine.members.over:
                mine.finish_alone(take(mine, watch))
                mine.engine.close()
                return run.read()
            if max(mine.saved) or mine.engine.members.step_of_others:
                mine.rejoin()
        board = [TensorBoard()] if options.tensorboard else []
        ended = mine.run(watch, page, *board, shared=False)
        missing = mine.engine.members.missing
        mine.engine.close()
        if not ended:
            raise KeyboardInterrupt
        mine.finish_alone()
    if site and missing:
        give(run.read(), _opener(site, run), missing, options.peer_timeout, linger)
    return run.read()


def _number(place: MeetingPlace) -> int:
    """The node's number, from the site's folder or as given."""
    if isinstance(place, InFederation):
        return SiteFolder(place.folder).own().node
    host, _, port = place.address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"rendezvous must be HOST:PORT, got {place.address!r}")
    return place.node


def _seat(place: MeetingPlace, run: RunFolder, node: int, n: int, patience: float, around: ExitStack) -> Seat:
    """The node's seat; `around` its training, the rendezvous is told if the run cannot continue."""
    experiment = run.experiment
    if isinstance(place, InFederation):
        return Seat(_opener(place, run), node, spread(n, n), experiment.hash)
    host, _, port = place.address.rpartition(":")
    store, seat = seat_in(experiment, Meeting(meet(host, port, patience), experiment.hash), node, n)
    around.enter_context(ending(store))
    return seat


def _opener(place: InFederation, run: RunFolder) -> SiteOpener:
    return SiteOpener(SiteFolder(place.folder), place.listen, Audit(run.folder / AUDIT))
