"""Objects that an experiment names by package.module:name: a run is not continued after their code has changed."""

from __future__ import annotations

from quasiglobal.common.files import read_json
from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.objects import facts_of, imported, is_path, note
from quasiglobal.data.sources import DataName
from quasiglobal.errors import InputError
from quasiglobal.runs.store import RunFolder


def check_objects(folder: RunFolder) -> None:
    """Note the content of the experiment's own objects; raise InputError if the run was trained with others."""
    one = folder.experiment
    data = [one.data] if DataName.parse(one.data).kind == "python" else []
    for what, texts in (("model", [one.model]), ("loss", [one.loss]), ("metric", one.metric), ("data set", data)):
        for text in texts:
            if is_path(text):
                _check(folder, text, what)


def _check(folder: RunFolder, text: str, what: str) -> None:
    try:
        digest = fingerprint(imported(text, what))
    except InputError:                                      # a finished run is readable without its code
        return
    note(text, digest=digest)
    try:
        before = read_json(folder.folder / "experiment.json").get("objects", {}).get(text, {}).get("digest", digest)
    except (OSError, ValueError, AttributeError):
        return
    if before != facts_of(text)["digest"]:
        raise InputError(
            f"{text} is another {what} than {folder.folder} was trained with; restore it, or train into another --runs "
            "folder"
        )
