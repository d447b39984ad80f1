"""Constants of the data, which all sites of a federation agree on before a run: classes, shape, mean and std.

Each site signs a file about its training examples, and the organiser pools the files (`qg site constants`, `qg
federation constants`). The organiser learns what `Share` has; the other sites learn the pooled constants alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from quasiglobal.common.files import Json, replacing
from quasiglobal.data.dataset import deviations, pooled, spread
from quasiglobal.data.sources import load_table, named, raw
from quasiglobal.data.texts import Corpus
from quasiglobal.errors import InputError, whole
from quasiglobal.peers.federation_file import Federation, read_signed
from quasiglobal.training.experiment import from_toml, read_settings

KIND = "constants"
"""What a site's signature covers, and the start of its file's name."""

MOST = 1e100
"""Limit on a mean or a variance, which NaN is not below either."""


MOST_EXAMPLES = 10**12
"""Limit on a number of examples."""

LONGEST = 200
"""Limit on the length of the name of a class or a column."""

FAR, LARGE = 10, 0.9
"""A site is doubted if its mean is as many standard deviations from the others', or its examples this share of all."""


@dataclass(frozen=True)
class Share:
    """The facts about one site's training examples that it tells the organiser."""

    classes: tuple[str, ...]
    shape: tuple[int, ...] = ()
    """Shape of an example; () for texts."""
    features: tuple[str, ...] = ()
    """Names of the columns of a table."""
    examples: int = 0
    """Number of training examples; 0 for texts and other data that are not normalised."""
    mean: tuple[float, ...] = ()
    """Mean and variance per channel."""
    variance: tuple[float, ...] = ()


def share_of(data: str, label: str = "") -> Share:
    """The facts about a user's own data; `label` is the column of a table's targets."""
    found = load_table(named(data), label) if label else raw(named(data))
    if isinstance(found, Corpus):
        return Share(found.classes)
    if not (found.mean and isinstance(found.train.x, Tensor)):
        return Share(found.classes, found.shape)
    sums = spread(found.train.x, found.scale)
    return Share(found.classes, found.shape, found.train.features, len(found.train), *sums)


def read_share(text: bytes, federation: Federation, where: str) -> tuple[str, Share]:
    """The name of the site that signed a file, and its facts."""
    site, said = read_signed(KIND, text, federation, where)
    return site.name, _checked(said, where)


def terms(shares: Mapping[str, Share]) -> dict[str, list[Any]]:
    """The constants of all sites' examples together, as in an experiment."""
    for (one, first), (other, second) in pairwise(shares.items()):
        for what in ("shape", "features"):
            mine, theirs = (list(getattr(share, what)) for share in (first, second))
            if mine != theirs:
                raise InputError(f"the {what} at {one} is {mine}, but at {other} {theirs}; give all data one form")
        if bool(first.mean) != bool(second.mean):
            raise InputError(f"only one of {one} and {other} has data with a mean; give all data one form")
        if _are_numbers(first.classes) != _are_numbers(second.classes):
            raise InputError(f"only one of {one} and {other} has numbers for classes; name the classes in all data")
    anyone = next(iter(shares.values()))
    classes = sorted({name for share in shares.values() for name in share.classes})
    if _are_numbers(classes):
        classes.sort(key=int)
    mean, variance = pooled([(share.examples, share.mean, share.variance) for share in shares.values()])
    found: dict[str, list[Any]] = {
        "classes": classes, "shape": [*anyone.shape], "mean": [*mean], "std": [*deviations(variance)],
    }
    return {name: values for name, values in found.items() if values}


def doubts(shares: Mapping[str, Share]) -> Iterator[str]:
    """Sentences about sites that decide the result by unusual numbers, by mistake or on purpose."""
    parts = {site: (share.examples, share.mean, share.variance) for site, share in shares.items() if share.mean}
    total = sum(share.examples for share in shares.values())
    for site, (examples, mean, variance) in parts.items() if len(parts) > 1 else ():
        usual, spread_of_others = pooled([part for other, part in parts.items() if other != site])
        others, own = deviations(spread_of_others), deviations(variance)
        if examples > LARGE * total:
            yield f"{site} has {100 * examples / total:.3g} % of all examples; ask whether that is so"
        far = [
            at for at, scale in enumerate(others) if abs(mean[at] - usual[at]) > FAR * scale or own[at] > FAR * scale
        ]
        if far:
            what = ", ".join(shares[site].features[at] if shares[site].features else f"channel {at}" for at in far[:3])
            yield f"{site} has a mean or spread of {what} far from the others'; ask whether its data are scaled alike"


def add_to(path: Path, constants: Mapping[str, list[Any]]) -> None:
    """Add the constants to an experiment; refuse to change any that it has. It may have more classes, in any order."""
    if path.suffix == ".json":
        raise InputError(f"{path} is JSON; name the experiment's TOML file")
    from_toml(path)
    there, added = read_settings(path), ""
    for name, values in constants.items():
        if name not in there:
            added += f"{name} = {json.dumps(values, ensure_ascii=False)}\n"
        elif there[name] != values and not (name == "classes" and {*values} <= {*there[name]}):
            raise InputError(f"{path} has another {name}, {there[name]}; delete this line, then run the command again")
    text = path.read_text().rstrip("\n")
    with replacing(path) as temporary:
        temporary.write_text(f"{text}\n{added}")


def _are_numbers(classes: Sequence[str]) -> bool:
    return all(name.isdecimal() for name in classes)


def _checked(said: Json, where: str) -> Share:
    """The facts in a file, if they are possible."""
    lists = {field.name for field in fields(Share)} - {"examples"}
    if said.keys() == {*lists, "examples"} and all(isinstance(said[name], list) for name in lists):
        share = Share(examples=whole(said["examples"]) or 0, **{name: tuple(said[name]) for name in lists})
        if (
            all(isinstance(one, str) and one.isprintable() for one in share.classes + share.features)
            and max(map(len, share.classes + share.features), default=0) <= LONGEST
            and 0 <= share.examples <= MOST_EXAMPLES
            and all((whole(side) or 0) > 0 for side in share.shape)
            and all(isinstance(one, float) and abs(one) < MOST for one in share.mean + share.variance)
            and all(one >= 0 for one in share.variance)
            and len(share.mean) == len(share.variance) == (share.shape[:1] or (0,))[0] * (share.examples > 0)
        ):
            return share
    raise InputError(f"{where} has impossible constants; ask the site to run `qg site constants` again")
