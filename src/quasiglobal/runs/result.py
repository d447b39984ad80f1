"""The result of a run, for a site that missed its end: neighbours that have finished give it, the site takes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quasiglobal.errors import InputError
from quasiglobal.peers.edge import Expected
from quasiglobal.peers.membership import Membership
from quasiglobal.peers.sites import SiteOpener
from quasiglobal.runs.best import Kept, kept_in, values_of, write_best
from quasiglobal.runs.participant import Participant
from quasiglobal.runs.store import Run, Watcher
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import combined, ranking
from quasiglobal.training.rows import Checkpoint, NamedRows, complete_state, models_of

log = logging.getLogger("quasiglobal")


def has_result(experiment: Experiment) -> bool:
    """Whether one node's model is of use to another; with bn = "local" it has parts that stay at their node."""
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
    """Prepare to take the model of a neighbour that has ended, of exactly the own size, and to give the own."""
    def whole() -> Tensor:
        return packed(mine.program.rows_of(0))

    mine.engine.members.result = Expected(whole().numel(), whole().dtype)
    mine.engine.members.result_here = whole


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
    members = Membership(
        opener, node, neighbours, experiment=one.hash, topology=topology.fingerprint, timeout=timeout,
        model_here=lambda: None,
    )
    members.last_step, whole = one.epochs * (one.steps or 0), packed(run.rows()[0])
    members.result_here = lambda: whole
    log.info(
        "the run has ended; node %s may fetch its model from here for %g s (--linger; Ctrl-C ends this)",
        " or ".join(map(opener.called, waiting)), seconds,
    )
    try:
        members.hand_out(waiting, seconds)
    except KeyboardInterrupt:
        pass
    except InputError as error:                             # such as a port in use: the run has finished all the same
        log.warning("nobody can fetch the model from here: %s", error)
    for there in sorted(members.given):
        opener.audit.record("gave result", node=there, step=members.last_step)


def take(mine: Participant, watch: Watcher) -> dict[str, Any]:
    """End the run here with the model of a neighbour that has finished; return where it is from.

    Of several models, take the one with the best score on the own test examples: a neighbour may lie.
    """
    program, opener, (run,), (part,) = mine.program, mine.seat.through, mine.runs, mine.parts
    assert isinstance(opener, SiteOpener)
    results, saved, like = mine.engine.members.results, max(mine.saved), program.rows_of(0)
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
    log.warning("the run has ended; here is its model, from node %s, at step %d", opener.called(there), program.steps)
    opener.audit.record("fetched result", **source)
    run.describe()
    part.begin(saved)
    mine.write_part(measures, rows)
    note = Kept(mine.seat.rank, record["epoch"], score.name, values_of(record, score.name)[0])
    if all(score.worth(note.value) > score.worth(one.value) for one in kept_in(run.folder)):
        write_best(run.folder, note, complete_state(program.task.module(0), rows, program.layout, 0))
    watch([run], [record])
    return {"fetched": source}
