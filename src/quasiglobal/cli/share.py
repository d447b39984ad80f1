"""Commands that export a trained model and use it: export, evaluate, predict."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import DataFolder, File, Json, RunArgument, call
from quasiglobal.cli.terminal import console, print_json, say_written
from quasiglobal.common.files import write_csv, write_json
from quasiglobal.errors import InputError
from quasiglobal.runs import export as exports
from quasiglobal.runs.predict import predict as predictions
from quasiglobal.runs.store import read_run

ModelPath = Annotated[
    Positional[Path], arg(metavar="MODEL", help="The output of `qg export`: a folder or a .safetensors file.")
]


def export(
    folder: RunArgument,
    node: str = "average",
    best: bool = False,
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("out/model"),
    data_dir: DataFolder = None,
) -> None:
    """Write a run's model into a self-contained folder.

    The folder has the weights (model.safetensors), the terms of the data (model.json), a README with the lines that
    load the model in plain PyTorch, and, where the network allows, files for torch.export and ONNX, which are tested to
    give the same outputs.

    Args:
        node: Index of the node whose model to export, or average for the averaged model.
        best: Export the best model of the node by its score, instead of the last (`qg node`, `qg train --keep-best`).
        out: The folder to write; NAME.safetensors writes the weights alone, a plain state_dict.
    """
    run = read_run(folder)
    exported = exports.export(run, node, data_dir, best)
    held = run.rows()[1]
    if node == "average" and len(held) == 1 < run.experiment.resolved.nodes:
        console.print(
            f"{folder} holds node {held[0]} alone: this is its own model, not the average of the network",
            soft_wrap=True,
        )
    if out.suffix == ".safetensors":
        exports.save(exported, out)
        say_written([out])
        return
    with console.status("writing the model"):
        written = exports.save_folder(exported, out)
    say_written(written.files)
    for name, why in written.left_out.items():
        console.print(f"without {name}: {why}", soft_wrap=True)


def evaluate(
    model: ModelPath,
    data: Annotated[Positional[str | None], arg(metavar="DATA")] = None,
    data_dir: DataFolder = None,
    json: Json = False,
) -> None:
    """Test an exported model on labelled data.

    Args:
        data: A data set; by default the one that the model was trained on. folder:PATH and csv:PATH are your own;
            all rows of a text file or a table count.
    """
    found = exports.score(exports.read(model), data, data_dir)
    if json:
        print_json(asdict(found))
    else:
        percent = f"{100 * found.value:.2f}% of"
        value = percent if found.metric == "accuracy" else f"{found.metric} {found.value:.6g} on"
        console.print(f"{value} {found.examples} test examples of {found.data}", soft_wrap=True)


def predict(
    model: ModelPath,
    data: Annotated[Positional[tuple[str, ...]], arg(metavar="DATA...")],
    out: File | None = None,
    resize: bool = False,
    data_dir: DataFolder = None,
    json: Json = False,
) -> None:
    """Predict for data without labels: the class and every class's probability, or the numbers of a regression.

    Args:
        data: Image files and folders of images; or one .npz archive with x, one CSV table of numbers, one file of
            texts (.txt with a text per line, or .csv with a column text), - for texts from the standard input; or the
            test examples of a data set, such as digits or folder:PATH.
        out: Write a .csv or .json file; by default CSV is printed.
        resize: Scale the middle of each image to the model's size; otherwise another size is an error.
    """
    if not data:
        raise InputError("name the data to predict for, as in `qg predict MODEL images/`")
    if out is not None and out.suffix not in (".csv", ".json"):
        raise InputError(f"{out} is neither a .csv nor a .json file")
    found = predictions(exports.read(model), data, data_dir, resize)
    if out is not None:
        if out.suffix == ".json":
            write_json(out, found.objects())
        else:
            write_csv(out, found.rows())
        say_written([out])
    elif json:
        print_json(found.objects())
    else:
        rows = found.rows()
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "evaluate":                                  # `--data X`, as before the data became an argument
        words = [word.removeprefix("--data=") for word in words if word != "--data"]
    call({"export": export, "evaluate": evaluate, "predict": predict}, name, words)
