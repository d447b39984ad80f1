"""`qg demo`: the paper's main result on embedded data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quasiglobal.cli.arguments import Folder, Json, call
from quasiglobal.cli.listing import Listing
from quasiglobal.cli.terminal import console, print_json, progress_bar, say_written
from quasiglobal.common.files import write_csv
from quasiglobal.reproduction.paper import demo as demonstration
from quasiglobal.runs import plots


def demo(out: Folder = Path("out"), json: Json = False) -> None:
    """Compare no, local and quasi-global momentum on heterogeneous data, and centralized training.

    Trains 16 small convolutional networks on a ring to recognise digits. Takes three to four minutes on two cores.

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
    if json:
        print_json([{f"{key}{PERCENT.get(key, '')}": value for key, value in row.items()} for row in rows])
    else:
        Listing(rows, {
            "algorithm": "algorithm",
            "data": "data",
            "tuned lr": lambda row: f"{row['lr']:g}",
            "test accuracy, %": lambda row: f"{row['accuracy']:.1f} ± {row['std']:.1f}",
            "best test": lambda row: f"{row['best']:.1f}",
            "worst node": lambda row: f"{row['worst_node']:.1f}",
            "averaged model": lambda row: f"{row['averaged_model']:.1f}",
        }).show()
    by_name = {row["algorithm"]: row for row in rows}               # keeps the last row, of the smallest α
    local, quasi = by_name["dsgdm-n"], by_name["qg-dsgdm-n"]
    console.print(
        f"At {local['data']}, local momentum (dsgdm-n) reaches {local['accuracy']:.1f}%, quasi-global momentum "
        f"(qg-dsgdm-n) {quasi['accuracy']:.1f}%, with the same traffic.\nAccuracy is the mean over the nodes' "
        f"models after the last epoch, ± std over {setting.seeds} seeds; best is that of the best test; learning rates "
        "are tuned on another seed; sgdm-n is centralized."
    )
    written = plots.save(demonstration.draw(setting, outcomes), out, "demo")
    write_csv(out / "demo.csv", rows)
    say_written([*written, out / "demo.csv", out / "runs"])


PERCENT = dict.fromkeys(("accuracy", "std", "best", "worst_node", "averaged_model"), "_percent")
"""Unit of the numbers in per cent, part of their names in JSON."""


def run(name: str, words: Sequence[str]) -> None:
    """Run this command."""
    call({"demo": demo}, name, words)
