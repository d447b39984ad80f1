"""Arguments that several commands have, and how words become a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Positional, arg

from quasiglobal.errors import InputError
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment, from_toml

Name = Annotated[Positional[str | None], arg(metavar="NAME")]
Folder = Annotated[Path, arg(metavar="FOLDER")]
Folders = Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...")]
File = Annotated[Path, arg(metavar="FILE")]
RunArgument = Annotated[Positional[Path], arg(metavar="RUN")]
Around = Annotated[Options, arg(name="")]


def call(commands: Mapping[str, Callable[..., None]], name: str, words: Sequence[str]) -> None:
    """Call a command, a function with typed arguments, with these words."""
    tyro.cli(commands[name], prog=f"qg {name}", args=list(words))


@dataclass(frozen=True)
class Draft(Experiment):
    """An experiment as flags alone say it, before a file's values are known: nothing is checked yet."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class ExperimentCommand:
    """A command about one experiment: a TOML file, and flags that win over it."""

    file: Annotated[Positional[Path | None], arg(metavar="FILE.toml")] = None
    """A TOML file with any of the experiment's options; flags win."""
    experiment: Annotated[Experiment, arg(name="")] = field(default_factory=Experiment)
    options: Around = field(default_factory=Options)


Parsed = TypeVar("Parsed", bound=ExperimentCommand)


def parsed(kind: type[Parsed], name: str, words: Sequence[str]) -> Parsed:
    """A command from its words: once to find the file, then with the file's values as defaults."""
    def parse(experiment: Experiment) -> Parsed:
        result: Parsed = tyro.cli(
            kind, prog=f"qg {name}", args=list(words), default=replace(kind(), experiment=experiment)
        )
        return result

    file = parse(Draft()).file
    if file is not None and file.suffix != ".toml":     # a word that would be passed over, as in `--pretrained false`
        raise InputError(f"{file} is no .toml file; switches take no value, as in --no-pretrained")
    return parse(from_toml(file) if file else Experiment())


def only_simulated(name: str, options: Options) -> None:
    """Refuse an engine that the command would ignore."""
    if options.engine != "simulator":
        raise InputError(f"qg {name} trains on the simulator; leave out --engine distributed")


def described(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values as texts."""
    return [(name, str(value)) for name, value in values.items()]
