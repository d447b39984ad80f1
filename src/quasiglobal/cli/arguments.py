"""Arguments shared by several commands, and parsing of command lines."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from textwrap import indent
from typing import Annotated, TypeVar

import tyro
from tyro.conf import Positional, arg

from quasiglobal.cli import wrapped
from quasiglobal.common import own_code
from quasiglobal.errors import InputError
from quasiglobal.runs.options import Options, split_options
from quasiglobal.runs.store import RunStore
from quasiglobal.training.experiment import Experiment, from_mapping, read_settings

Name = Annotated[Positional[str | None], arg(metavar="NAME")]
Folder = Annotated[Path, arg(metavar="FOLDER")]
RunsFolder = Annotated[Positional[Path], arg(metavar="FOLDER")]
Folders = Annotated[
    Positional[tuple[Path, ...]], arg(metavar="RUN...", help="Run folders; by default all in runs/.")
]
File = Annotated[Path, arg(metavar="FILE")]
RunArgument = Annotated[Positional[Path], arg(metavar="RUN", help="A run folder.")]
DataFolder = Annotated[
    Path | None, arg(metavar="FOLDER", help="The folder of the data sets; by default $QG_DATA or ./data.")
]
Json = Annotated[
    bool,
    arg(
        name="json",
        help="Print one JSON document on standard output, with raw numbers and null for unknown values. "
        "Everything else goes to standard error.",
    ),
]
Around = Annotated[Options, arg(name="")]


def call(commands: Mapping[str, Callable[..., None]], name: str, words: Sequence[str]) -> None:
    """Parse the words and call the command, a function with typed arguments."""
    command = commands[name]

    @wraps(command)
    def typed(*given: object, **more: object) -> None:
        own_code.give((given, more))
        command(*given, **more)

    tyro.cli(typed, prog=f"qg {name}", description=about(command), args=list(words))


def about(command: object) -> str:
    """The description of a command: its docstring without the arguments, wrapped and indented.

    tyro joins lines that begin with a letter.
    """
    text = wrapped((inspect.getdoc(command) or "").partition("\n\nArgs:")[0], narrower=2)
    return indent(text, "  ") if sys.stdout.isatty() else text


@dataclass(frozen=True)
class Draft(Experiment):
    """An experiment from flags alone, not validated: the TOML file's values are not known yet."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class ExperimentCommand:
    """A command about one experiment: a TOML file, and flags that override it."""

    file: Annotated[Positional[Path | None], arg(metavar="FILE.toml")] = None
    """A TOML file with any of these options, or the experiment.json of a run; flags override it."""
    experiment: Annotated[Experiment, arg(name="")] = field(default_factory=Experiment)
    options: Around = field(default_factory=Options)


Parsed = TypeVar("Parsed", bound=ExperimentCommand)


def parsed(kind: type[Parsed], name: str, words: Sequence[str]) -> Parsed:
    """Parse a command twice: once to find the TOML file, then with the file's values as defaults."""
    words = gathered(words, "--metric")

    def parse(experiment: Experiment, options: Options) -> Parsed:
        result: Parsed = tyro.cli(
            kind, prog=f"qg {name}", description=about(kind), args=list(words),
            default=replace(kind(), experiment=experiment, options=options),
        )
        return result

    draft = parse(Draft(), Options())
    file = draft.file
    own_code.give(asdict(draft.experiment))
    if file is None:
        return parse(Experiment(), Options())
    if file.suffix not in (".toml", ".json"):           # a stray word, as in `--pretrained false`
        raise InputError(f"{file} is not a .toml file; switches accept no value: write --no-pretrained")
    settings, options = split_options(read_settings(file), str(file))
    return parse(from_mapping(settings, str(file), [field.name for field in fields(Options)]), options)


def gathered(words: Sequence[str], option: str) -> list[str]:
    """Join the values of an option that is given several times.

    >>> gathered(["--metric", "f1", "--lr", "0.1", "--metric=auc"], "--metric")
    ['--lr', '0.1', '--metric', 'f1', 'auc']
    """
    rest, values = [], []
    taking = False
    for word in words:
        if word == option or word.startswith(f"{option}="):
            taking = word == option
            values += [] if taking else [word.partition("=")[2]]
        elif taking and not word.startswith("-"):
            values.append(word)
        else:
            taking = False
            rest.append(word)
    return [*rest, option, *values] if values else rest


def store_at(folder: Path, make: str = "qg train") -> RunStore:
    """Read the runs in a folder, which must exist; `make` is the command that creates such runs."""
    if folder.is_file():
        raise InputError(f"{folder} is a file; name the folder of your runs")
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; name the folder of your runs, or create runs with `{make}`")
    return RunStore.read(folder)


def only_simulated(name: str, options: Options) -> None:
    """Raise an error for an engine that the command would ignore."""
    if options.engine != "simulator":
        raise InputError(f"qg {name} trains on the simulator; leave out --engine distributed")
