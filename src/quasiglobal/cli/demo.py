"""`qg demo`: the paper's main result on embedded data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from quasiglobal.cli.arguments import Folder, call
from quasiglobal.cli.terminal import console, progress_bar, say_written
from quasiglobal.common.files import write_csv
from quasiglobal.paper import demo as demonstration
from quasiglobal.report import plots


def demo(out: Folder = Path("out")) -> None:
    """Compare no, local and quasi-global momentum on heterogeneous data, and centralized training.

    Trains 16 small convolutional networks on a ring to recognise digits. Takes two minutes on two cores.

    Args:
        out: The folder for demo.png, demo.svg, demo.csv and the runs.
    """
    setting = demonstration.DemoSetting()
    alphas = " and ".join(f"{alpha:g}" for alpha in setting.alphas)
    console.print(
        "16 nodes on a ring, each with only a few kinds of digits, learn to read all ten "
        f"(Dirichlet α = {alphas}).\nImages stay at their node; neighbours average their models after each step.\n"
    )
    with progress_bar() as progress:
        task = progress.add_task("", total=setting.epochs)
        outcomes = demonstration.compare(
            setting, out / "runs", advance=lambda name: progress.update(task, advance=1, description=name)
        )
    rows = demonstration.numbers(outcomes)
    table = Table("algorithm", "data", "tuned lr", "test accuracy, %", "worst node", "averaged model")
    for row in rows:
        table.add_row(
            f"{row['algorithm']}", f"{row['data']}", f"{row['lr']:g}", f"{row['accuracy']:.1f} ± {row['std']:.1f}",
            f"{row['worst_node']:.1f}", f"{row['averaged_model']:.1f}",
        )
    console.print(table)
    by_name = {row["algorithm"]: row for row in rows}               # keeps the last row, of the smallest α
    local, quasi = by_name["dsgdm-n"], by_name["qg-dsgdm-n"]
    console.print(
        f"At {local['data']}, local momentum (dsgdm-n) reaches {local['accuracy']:.1f}%, quasi-global momentum "
        f"(qg-dsgdm-n) {quasi['accuracy']:.1f}%, with the same traffic.\nAccuracy is the mean over the nodes' "
        f"models, ± std over {setting.seeds} seeds; learning rates are tuned on another seed; sgdm-n is centralized."
    )
    written = plots.save(demonstration.draw(setting, outcomes), out, "demo")
    write_csv(out / "demo.csv", rows)
    say_written([*written, out / "demo.csv", out / "runs"])


def run(name: str, words: Sequence[str]) -> None:
    """Run this command."""
    call({"demo": demo}, name, words)
