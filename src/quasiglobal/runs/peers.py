"""One node on its own: its own files, its own folder, and neighbours that it meets at a rendezvous.

The case of owners who may not share their data. What they have to agree on is in the experiment, whose hash is part of
every admission: the classes, the shape of an example, the normalisation, and the steps of an epoch, since nobody tells
how many examples it has. Nothing but parameters leaves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quasiglobal.data.sources import named
from quasiglobal.engines.distributed.engine import Distributed, spread
from quasiglobal.engines.distributed.gloo import Meeting
from quasiglobal.engines.distributed.rendezvous import meet
from quasiglobal.errors import InputError
from quasiglobal.models.language.loading import PREFIX
from quasiglobal.runs.local import Options, Run, Watcher, choose_device, data_of, facts, make_task
from quasiglobal.runs.parts import Part, records_of
from quasiglobal.runs.processes import refuse_faults, rejoin, take_part
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Training

AGREED = ("classes", "shape", "steps")
"""What an experiment has to say where every node brings its own data."""

AGREED_OF_IMAGES = ("mean", "std")
"""And further, where it is no text."""


def agreement(experiment: Experiment) -> Experiment:
    """The experiment as all nodes run it, whatever each of them calls its data."""
    text = experiment.model.startswith(PREFIX)
    needed = AGREED if text else AGREED + AGREED_OF_IMAGES
    missing = [name for name in needed if not getattr(experiment, name)]
    if missing:
        raise InputError(
            f"nodes with their own data have to agree on {', '.join(missing)}; add it to the experiment "
            f"(`qg data {'csv' if text else 'folder'}:PATH` shows what yours has)"
        )
    refuse_faults(experiment)
    return replace(experiment, data="own", partition="whole")


def train(
    experiment: Experiment,
    node: int,
    data: str,
    rendezvous: str,
    options: Options,
    patience: float,
    watch: Watcher = lambda runs, records: None,
) -> Run:
    """Train one node on its own data, with the neighbours that come within `patience` seconds."""
    experiment = agreement(experiment)
    n = parse(experiment.topology).n
    if not 0 <= node < n:
        raise InputError(f"node must be from 0 to {n - 1} on {experiment.topology}, got {node}")
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"rendezvous must be HOST:PORT, got {rendezvous!r}")
    run = Run.of(experiment, options.runs)
    if run.summary is not None:
        return run
    task = make_task(experiment, data_of(experiment, None, named(data)))
    part = Part(run.folder, node, [node])
    saved = max(part.epochs())
    training = Training(
        task, [experiment], choose_device(options.device),
        partial(
            Distributed, store=Meeting(meet(host, port, patience), experiment.hash), rank=node, hosted=spread(n, n),
            timeout=options.peer_timeout, host=options.host, experiment=experiment.hash,
        ),
    )
    training.warm_up()
    engine = training.engine
    assert isinstance(engine, Distributed)
    engine.connect(saved * experiment.steps, patience)
    if saved or engine.step_of_others:
        rejoin(training, engine, [part], saved)
    take_part(training, engine, [run], [part], watch)
    engine.close()
    run.rewrite(records_of([part]))
    run.finish(part.status or "finished", facts(training, 0))
    return run
