"""Somebody's own method on the leaderboard."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

from quasiglobal.algorithms import ALGORITHMS, algorithm, name_of
from quasiglobal.checks import CheckFailed, check_algorithm
from quasiglobal.common.objects import fault, sources
from quasiglobal.engines.costs import traffic
from quasiglobal.errors import InputError
from quasiglobal.reproduction.leaderboard.contenders import Contender, contender, contenders
from quasiglobal.reproduction.leaderboard.protocol import Tier
from quasiglobal.reproduction.leaderboard.standings import file_name, read_standing


def newcomer(text: str, tier: Tier, name: str, topology: str, lr: float, records: Path) -> Contender:
    """Somebody's own method, under a name that is not taken by another one, also not in the records."""
    if not 0 <= lr < math.inf:
        raise InputError(f"lr must be a number > 0, got {lr}")
    chosen = algorithm(text)
    try:
        traffic(chosen)                                     # runs a step
        one = contender(text, tier, name, topology, lr)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{text} fails, {fault(error)}; check it with `qg algorithms {text} --check`") from error
    if name_of(text) not in ALGORITHMS:
        try:
            check_algorithm(chosen)                         # a class that breaks the rules would get a wrong row
        except CheckFailed as failed:
            raise InputError(str(failed)) from None
    if file_name(one.name) == file_name(""):
        raise InputError(f"a name needs a letter or a digit, got {one.name!r}")
    taken = next((other for other in contenders(tier) if file_name(other.name) == file_name(one.name)), None)
    built_in = taken is not None and taken.settings == one.settings
    if taken is not None and not built_in:
        whose = "" if taken.name == one.name else f", {taken.name}, as a file"
        raise InputError(
            f"{one.name} is the name of another method of tier {tier.name}{whose}; give yours another --name"
        )
    found = read_standing(path := records / tier.name / file_name(one.name))
    if found is not None and (found.name, found.settings) != (one.name, one.settings):
        raise InputError(
            f"{path} is the record of {found.name} ({found.algorithm}, {found.topology}); give yours another --name, "
            "or delete it"
        )
    if found is not None and built_in:
        raise InputError(
            f"{path} is the record of this method already; to train it anew: "
            f"qg leaderboard {tier.name} --methods {one.name!r} --again"
        )
    return one


def source(text: str) -> str:
    """Hash of a method's files and options, after a change of which its runs are repeated; empty if it is built in."""
    name = name_of(text)
    if name in ALGORITHMS:
        return ""
    options = repr(algorithm(text)).encode()                # imports the files
    files = b"".join(path.read_bytes() for path in sources(name.partition(":")[0]))
    return hashlib.sha256(files + options).hexdigest()[:8]
