"""Objects that an experiment names by package.module:name: a run is not continued after their code has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from quasiglobal.common.files import read_json
from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.objects import Named, facts_of, imported, is_path
from quasiglobal.data.sources import DataName
from quasiglobal.errors import InputError
from quasiglobal.runs.store import RunFolder
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import facts_of_metric


def identified(experiment: Experiment) -> Experiment:
    """The same experiment; the texts that name objects by their paths carry the digest of the objects' content."""
    found = {}
    for what, text in _paths(experiment):
        with suppress(InputError):                          # a finished run is readable without its code
            further = facts_of_metric(text) if what == "metric" else {}
            found[text] = Named(text, None, {"digest": fingerprint(imported(text, what))} | further)

    def named(text: str) -> str:
        return found.get(text, text)

    return replace(
        experiment, data=named(experiment.data), model=named(experiment.model), loss=named(experiment.loss),
        metric=tuple(map(named, experiment.metric)),
    )


def check_objects(folder: RunFolder) -> None:
    """Raise InputError if the run was trained with other objects than its experiment (`identified`) names now."""
    for what, text in _paths(folder.experiment):
        digest = facts_of(text).get("digest")
        try:
            before = read_json(folder.folder / "experiment.json").get("objects", {}).get(text, {}).get("digest", digest)
        except (OSError, ValueError, AttributeError):
            continue
        if digest is not None and before != digest:
            raise InputError(
                f"{text} is another {what} than {folder.folder} was trained with; restore it, or train into another "
                "--runs folder"
            )


def _paths(one: Experiment) -> Iterator[tuple[str, str]]:
    """What each path in an experiment names, and the path."""
    data = [one.data] if DataName.parse(one.data).kind == "python" else []
    for what, texts in (("model", [one.model]), ("loss", [one.loss]), ("metric", one.metric), ("data set", data)):
        yield from ((what, text) for text in texts if is_path(text))
