"""Commands that export a trained model and use it: export, evaluate, predict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import File, Folder, RunArgument, call
from quasiglobal.cli.terminal import console, say_written
from quasiglobal.data.readers.tables import read_texts
from quasiglobal.errors import InputError
from quasiglobal.runs import export as exports
from quasiglobal.runs.loading import data_of
from quasiglobal.runs.store import read_run

ModelFile = Annotated[Positional[Path], arg(metavar="MODEL")]


def export(
    folder: RunArgument,
    node: str = "average",
    out: File = Path("out/model.safetensors"),
    data_dir: Folder | None = None,
) -> None:
    """Write a run's model as a plain state_dict in safetensors.

    Args:
        folder: A run folder.
        node: Index of the node whose model to export, or average for the averaged model.
        out: The file to write.
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
    """
    exports.save(exports.export(read_run(folder), node, data_dir), out)
    say_written([out])


def evaluate(file: ModelFile, data: str | None = None, data_dir: Folder | None = None) -> None:
    """Test an exported model.

    Args:
        file: A file that `qg export` wrote.
        data: A data set to test on instead of the model's own; csv:FILE uses all rows.
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
    """
    model = exports.read(file)
    dataset = data_of(model.experiment, data_dir, data, testing=True)
    right = model.predict(dataset, dataset.test) == dataset.test.y
    console.print(f"{100 * right.double().mean():.2f}% of {len(right)} test examples of {dataset.name}")


def predict(
    file: ModelFile, data: Annotated[Positional[str], arg(metavar="DATA")], data_dir: Folder | None = None
) -> None:
    """Print the class that an exported model predicts for each test example, or for each line of a file of texts.

    Args:
        file: A file that `qg export` wrote.
        data: A data set, such as folder:PATH or csv:PATH (of a file, all rows in order);
            PATH.txt, with one text per line; or - for standard input.
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
    """
    model = exports.read(file)
    if data == "-" or data.endswith(".txt"):
        print(*model.classify(read_texts(data)), sep="\n")
        return
    if Path(data).is_file():
        raise InputError(f"{data} is neither a .txt file nor a data set; name its format, as in csv:{data}")
    dataset = data_of(model.experiment, data_dir, data, testing=True)
    for label in model.predict(dataset, dataset.test).tolist():
        print(dataset.classes[label])


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    call({"export": export, "evaluate": evaluate, "predict": predict}, name, words)
