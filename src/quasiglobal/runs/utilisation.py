"""Utilisation of the device: how much of the time it trained, and on how many rows.

With the option `utilisation`, a training appends a line to that file when a program ends.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quasiglobal.common.files import append_line, read_lines
from quasiglobal.training.loop import Callback, Loop


@dataclass
class Utilisation:
    """Work of one program, or of several one after the other."""

    began: float = 0.0
    """Seconds since 1970."""
    wall: float = 0.0
    """Seconds from the beginning to the end."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of training, compiling, loading, testing and saving."""
    examples: float = 0.0
    """Training examples of all rows in use."""
    row_seconds: float = 0.0
    """Rows in use, times the seconds in which they trained."""
    computed: float = 0.0
    """The same with the rows of runs that have ended and were not replaced yet."""

    def __str__(self) -> str:
        """The utilisation in words.

        >>> one = Utilisation(wall=200, seconds={"training": 150, "testing": 30}, examples=3e6, row_seconds=14400,
        ...                   computed=15000)
        >>> print(one)
        the device trained for 75% of 200 s (testing 15%, else 10%): 20,000 examples/s, 96 rows, 4% of them in vain
        """
        if not self.wall or not self.seconds.get("training"):
            return "the device did not train"
        training = self.seconds["training"]
        parts = {name: value for name, value in self.seconds.items() if name != "training"}
        parts["else"] = self.wall - sum(self.seconds.values())
        shares = {name: value / self.wall for name, value in parts.items()}
        said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        vain = 1 - self.row_seconds / self.computed
        return (
            f"the device trained for {training / self.wall:.0%} of {self.wall:,.0f} s ({said}): "
            f"{self.examples / training:,.0f} examples/s, {self.row_seconds / training:.0f} rows"
            + (f", {vain:.0%} of them in vain" if vain >= 0.005 else "")
        )


class WriteUtilisation(Callback):
    """Measures the utilisation in a training, and appends it to a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, Utilisation(began=time.time())
        self._before = 0.0

    def on_epoch(self, loop: Loop) -> None:
        program, found = loop.program, self.found
        nodes, training = len(program.engine.nodes), program.seconds["training"]
        spent, self._before = training - self._before, training
        rows = nodes * len(loop.latest)
        found.examples += rows * program.feed.examples
        found.row_seconds += rows * spent
        found.computed += nodes * len(loop.members) * spent

    def on_end(self, loop: Loop) -> None:
        self.found.wall, self.found.seconds = time.time() - self.found.began, dict(loop.program.seconds)
        append_line(self.path, asdict(self.found))


def utilisation(path: Path, since: float) -> Utilisation:
    """The utilisation by the programs in a file that began after a time, over the whole time until now."""
    total = Utilisation(began=since, wall=time.time() - since)
    for line in read_lines(path):
        one = Utilisation(**line)
        if one.began < since:
            continue
        total.examples += one.examples
        total.row_seconds += one.row_seconds
        total.computed += one.computed
        for name, value in one.seconds.items():
            total.seconds[name] += value
    return total
