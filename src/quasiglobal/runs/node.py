"""A single node with its own data (`qg node`), in a federation of sites or at a rendezvous.

Neighbours that have finished give the result of the run to a site that missed its end.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quasiglobal.common.files import make_private
from quasiglobal.data.dataset import Dataset, keyed_fingerprint
from quasiglobal.data.sources import named
from quasiglobal.engines.distributed import LateModels
from quasiglobal.engines.trust import SUGGESTED
from quasiglobal.errors import InputError
from quasiglobal.peers.audit import AUDIT
from quasiglobal.peers.bandwidth import Cap
from quasiglobal.peers.dialling import Proxy
from quasiglobal.peers.edge import Expected
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.peers.membership import Membership
from quasiglobal.peers.rendezvous import Meeting, meet, spread
from quasiglobal.peers.sites import Audit, SiteOpener
from quasiglobal.runs.agreement import agreement, refuse_between_sites, trust_of
from quasiglobal.runs.best import Kept, kept_in, values_of, write_best
from quasiglobal.runs.building import data_of, make_task
from quasiglobal.runs.callbacks import TensorBoard
from quasiglobal.runs.checkpoints import Part, newest_of_parts
from quasiglobal.runs.distributed import Participant, Seat, ending, seat_in
from quasiglobal.runs.options import Options
from quasiglobal.runs.prometheus import Prometheus
from quasiglobal.runs.store import Run, RunFolder, Watcher, unchanged_folders, unwatched
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import patient_interrupts
from quasiglobal.training.metrics import combined, ranking
from quasiglobal.training.rows import Checkpoint, NamedRows, complete_state, models_of

log = logging.getLogger("quasiglobal")

UNKNOWN = "the fingerprint of the data is not recorded: site.key is kept elsewhere; run `qg site renew --key FILE` once"


@dataclass(frozen=True)
class InFederation:
    """A site's folder, and how it connects to others."""

    folder: Path
    listen: str | None = None
    """HOST:PORT to listen at if it differs from the address in the federation file."""
    proxy: Proxy | None = None
    """The HTTP proxy that dials the neighbours."""
    bandwidth: float = math.inf
    """Maximum number of bytes per second that the site sends."""


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

    `metrics` is the PORT or HOST:PORT where Prometheus reads metrics. In a federation, neighbours that missed the end
    can fetch the model for `linger` seconds, and a node whose neighbours have all ended fetches the model of one.
    """
    site = place if isinstance(place, InFederation) else None
    experiment, node = agreement(experiment), _number(place)
    n = experiment.resolved.nodes
    if not 0 <= node < n:
        raise InputError(f"node must be from 0 to {n - 1} on {experiment.topology}, got {node}")
    (run,) = unchanged_folders(experiment, options)
    experiment = run.experiment
    if site:
        refuse_between_sites(experiment)
        keep_private(run.folder)
    options = replace(options, trust=trust_of(experiment, options.trust, SUGGESTED if site else math.inf))
    if run.read_summary() is not None:
        if site:
            give(run.read(), _opener(site, run), None, options.peer_timeout, linger)
        return run.read()
    task = make_task(experiment, data_of(experiment, None, named(data)))
    facts = facts_of_data(task.data, site, Part(run.folder, node, [node])) if site else {}
    with ExitStack() as around:
        seat = _seat(place, run, node, n, patience, around, facts)
        mine = Participant(task, [run], seat, options, data=facts.get("data"))
        if isinstance(seat.through, SiteOpener):
            around.enter_context(recorded(seat.through, run))
        mine.check_saved()
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
                mine.finish_alone(fetched=take(mine, watch))
                mine.engine.close()
                return run.read()
            if max(mine.saved) or mine.engine.members.step_of_others:
                mine.rejoin()
        board = [TensorBoard()] if options.tensorboard else []
        ended = mine.run(watch, page, *board, shared=False)
        missing = mine.engine.members.missing
        if ended:
            mine.finish_alone()
            if isinstance(mine.seat.through, SiteOpener):
                with patient_interrupts() as noted:
                    mine.seat.through.relay_on(linger, noted)
        mine.engine.close()
        if not ended:
            raise KeyboardInterrupt
    if site and missing:
        give(run.read(), _opener(site, run), missing, options.peer_timeout, linger)
    return run.read()


def _number(place: MeetingPlace) -> int:
    """The node's number, from the site's folder or as given."""
    if isinstance(place, InFederation):
        return SiteFolder(place.folder).own().node
    host, _, port = place.address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"rendezvous must be HOST:PORT, got {place.address!r}")
    return place.node


def _seat(
    place: MeetingPlace, run: RunFolder, node: int, n: int, patience: float, around: ExitStack, facts: dict[str, str]
) -> Seat:
    """The node's seat; `around` tells the rendezvous on exit if the run cannot continue."""
    experiment = run.experiment
    if isinstance(place, InFederation):
        return Seat(_opener(place, run, facts), node, spread(n, n), experiment.hash)
    host, _, port = place.address.rpartition(":")
    store, seat = seat_in(experiment, Meeting(meet(host, port, patience), experiment.hash), node, n)
    around.enter_context(ending(store))
    return seat


def _opener(place: InFederation, run: RunFolder, facts: dict[str, str] | None = None) -> SiteOpener:
    audit = Audit(run.folder / AUDIT)
    return SiteOpener(SiteFolder(place.folder), place.listen, audit, facts, place.proxy, Cap(place.bandwidth))


# ---------------------------------------------------------------------------------------- a site's own records


def keep_private(folder: Path) -> None:
    """Keep everything that this process writes, and everything in the run folder, from other users."""
    os.umask(0o077)
    if mode := make_private(folder):
        log.warning("%s had mode %o, so others could read this site's models; it has mode 700 now", folder, mode)


def facts_of_data(data: Dataset, site: InFederation, part: Part) -> dict[str, str]:
    """The fingerprint of the data by the site's key; also the last one before, if that is another."""
    key = SiteFolder(site.folder).data_key()
    if key is None:
        log.warning(UNKNOWN)
        return {}
    now = keyed_fingerprint(data, key)
    before = next((one["fingerprint"] for one in reversed(part.data())), now)
    if before == now:
        return {"data": now}
    log.warning("the data changed since the last start (fingerprint %.16s, now %.16s); training continues", before, now)
    return {"data": now, "data_before": before}


@contextmanager
def recorded(opener: SiteOpener, run: RunFolder) -> Iterator[None]:
    """Record how this process ends: finished, diverged, stopped, or the error; a killed one records nothing."""
    status = "stopped"
    try:
        yield
        summary = run.read_summary()
        status = summary.status if summary else status
    except InputError as error:
        status = f"failed: {error}"
        raise
    finally:
        opener.record_end(status)


# ---------------------------------------------------------------------------------------- the result of a run


def has_result(experiment: Experiment) -> bool:
    """Whether a node can use another's model; with bn = "local", parts of a model stay at their node."""
    return experiment.bn == "shared"


def packed(rows: NamedRows) -> Tensor:
    """A model as one row of numbers: its parameters and buffers."""
    models = models_of(rows)
    return torch.cat([models[name].flatten().to(models["x"].dtype) for name in sorted(models)])


def unpacked(numbers: Tensor, like: NamedRows) -> NamedRows:
    """The rows of a packed model; `like` has rows of the same sizes."""
    models = models_of(like)
    parts = torch.split(numbers, [models[name].numel() for name in sorted(models)])
    return {name: part.view_as(models[name]).to(models[name].dtype)
            for name, part in zip(sorted(models), parts, strict=True)}


def offer(mine: Participant) -> None:
    """Prepare to fetch the model of a neighbour that has ended, of exactly this node's size, and to give this node's.
    """
    def whole() -> Tensor:
        return packed(mine.program.rows_of(0))

    mine.engine.models.result = Expected(whole().numel(), whole().dtype)
    mine.engine.models.result_here = whole


def give(run: Run, opener: SiteOpener, to: Sequence[int] | None, timeout: float, seconds: float) -> None:
    """Give the model of a finished run to neighbours that missed its end, for at most `seconds`.

    End as soon as all in `to`, by default all neighbours, have connected.
    """
    one, node = run.experiment, opener.site.node
    if seconds <= 0 or run.status != "finished" or not has_result(one):
        return
    topology = one.resolved.topology
    links = topology.links()
    neighbours = [j for j in range(topology.n) if j != node and (links[node, j] or links[j, node])]
    waiting = [there for there in (neighbours if to is None else to) if opener.expects(there)]
    if not waiting:
        return
    saved, _ = newest_of_parts(run.folder)
    if saved is None or saved.epochs < one.epochs:
        log.warning("the last model in %s is lost: nobody can fetch it from here", run.folder)
        return
    models, whole = LateModels(lambda: None), packed(saved.rows)
    models.result_here = lambda: whole
    members = Membership(
        opener, node, neighbours, experiment=one.hash, topology=topology.fingerprint, timeout=timeout, handover=models,
    )
    members.last_step = one.epochs * (one.steps or 0)
    log.info(
        "the run has ended; %s may fetch its model from here for %g s (--linger; Ctrl-C ends this)",
        " or ".join(map(opener.called, waiting)), seconds,
    )
    with recorded(opener, RunFolder(run.folder, one)):
        try:
            members.hand_out(waiting, seconds)
        except KeyboardInterrupt:
            pass
        except InputError as error:                         # such as a port in use: the run has finished all the same
            log.warning("nobody can fetch the model from here: %s", error)
        for there in sorted(models.went_to):
            opener.audit.record("gave result", node=there, step=members.last_step)


def take(mine: Participant, watch: Watcher) -> dict[str, object]:
    """End the run here with the model of a neighbour that has finished; return its source.

    Of several models, take the one with the best score on this node's test examples: a neighbour may lie.
    """
    program, opener, (run,), (part,) = mine.program, mine.seat.through, mine.runs, mine.parts
    assert isinstance(opener, SiteOpener)
    results, saved, like = mine.engine.models.results, max(mine.saved), program.rows_of(0)
    if not results:
        raise InputError("the run has ended, and no neighbour gave its model; ask another one to run `qg node` again")
    found = {}
    for there, numbers in sorted(results.items()):
        program.restore([Checkpoint(unpacked(numbers, like), run.experiment.epochs)])
        measures = {
            "epoch": run.experiment.epochs, "step": program.steps, "lr": program.feed.schedules[0](program.steps),
            "nodes": list(program.engine.nodes), "loss": program.gradients().losses.tolist(), "images_per_second": 0.0,
        } | program.evaluate()[0] | {"bytes_sent": [float(sum(one["sent"] for one in mine.engine.accounts().values()))]}
        found[there] = measures, program.rows_of(0), combined([measures])
    score = ranking(run.experiment.metric, [record for _, _, record in found.values()])
    there = max(found, key=lambda one: score.worth(values_of(found[one][2], score.name)[0]))
    measures, rows, record = found[there]
    source = {"node": there, "site": opener.federation.site(there).name, "step": program.steps, "own_epochs": saved}
    log.warning("the run has ended; here is its model, from %s, at step %d", opener.called(there), program.steps)
    opener.audit.record("fetched result", **source)
    run.describe()
    part.begin(saved)
    mine.write_part(measures, rows)
    note = Kept(mine.seat.rank, record["epoch"], score.name, values_of(record, score.name)[0])
    if all(score.worth(note.value) > score.worth(one.value) for one in kept_in(run.folder)):
        write_best(run.folder, note, complete_state(program.task.module(0), rows, program.layout, 0))
    watch([run], [record])
    return source
