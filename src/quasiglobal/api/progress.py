"""Progress of `qg.train`: a bar in a terminal or in a notebook, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Loop
from quasiglobal.training.metrics import number

Show = Callable[[int, str], None]
"""Shows the number of completed epochs and a text."""


class ProgressBar:
    """Callback that shows the epoch, the training loss and the score."""

    def __init__(self, show: Show | None) -> None:
        self.show = show
        self._score = ""

    def on_epoch(self, run: Loop) -> None:
        """Show the epoch."""
        if self.show is None or 0 not in run.latest:
            return
        record = run.latest[0]
        if (value := number(record, run.score.name)) is not None:
            self._score = f"  {run.score.title} {run.score.shown(value)}"
        self.show(run.epoch, f"loss {record['loss']:.3g}{self._score}")


@contextmanager
def progress(experiment: Experiment) -> Iterator[ProgressBar]:
    """A bar for the epochs of an experiment; it disappears at the end."""
    console = Console(stderr=True, highlight=False, markup=False)
    if _in_notebook():
        yield ProgressBar(_notebook_bar(experiment.epochs))
    elif console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(experiment.algorithm, total=experiment.epochs)
            yield ProgressBar(lambda epoch, text: bar.update(task, completed=epoch, description=text))
    else:
        yield ProgressBar(None)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _notebook_bar(epochs: int) -> Show:
    """A bar in the output of the notebook's cell, without further packages."""
    ipython = import_module("IPython.display")

    def drawn(epoch: int, text: str) -> object:
        return ipython.HTML(f"<progress value='{epoch}' max='{epochs}'></progress> {epoch}/{epochs} {escape(text)}")

    handle = ipython.display(drawn(0, ""), display_id=True)
    return lambda epoch, text: handle.update(drawn(epoch, text))
