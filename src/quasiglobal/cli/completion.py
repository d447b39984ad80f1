"""`qg completion`: install the completion of commands, options and values in a shell."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional, arg

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.cli import groups
from quasiglobal.cli.arguments import call
from quasiglobal.cli.shells import SCRIPTS, Accepted, Described
from quasiglobal.cli.terminal import console, say_written
from quasiglobal.common.files import replacing
from quasiglobal.data.sources import PREFIXES, SOURCES, TEXT_SOURCES
from quasiglobal.metrics import BUILT_IN
from quasiglobal.models import MODELS, NORMS
from quasiglobal.runs.building import LOSSES
from quasiglobal.topology.parsing import FROM_LABELS, KINDS

Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[Positional[Shell], arg(metavar="SHELL")],
    to_stdout: Annotated[bool, arg(name="print")] = False,
) -> None:
    """Install the completion of commands, options and values in a shell, for this user.

    It is a static file; run the command again after an update of quasiglobal.

    Args:
        shell: bash, zsh or fish.
        to_stdout: Print the file instead of installing it.
    """
    script = SCRIPTS[shell](list(_commands()))
    if to_stdout:
        print(script, end="")
        return
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    file = {
        "bash": data / "bash-completion/completions/qg",
        "zsh": data / "zsh/site-functions/_qg",
        "fish": config / "fish/completions/qg.fish",
    }[shell]
    with replacing(file) as temporary:
        temporary.write_text(script)
    say_written([file])
    console.print({
        "bash": f"Open a new shell. Without the package bash-completion, add to ~/.bashrc: source {file}",
        "zsh": f"Add to ~/.zshrc, above compinit, if it is not there: fpath=({file.parent} $fpath); open a new shell.",
        "fish": "Open a new shell.",
    }[shell], soft_wrap=True)


DATA = (*SOURCES, *TEXT_SOURCES, *(f"{prefix}:" for prefix in PREFIXES))
TOPOLOGIES = (
    *(f"{name}:" if ":" in kind.example else name for name, kind in (KINDS | FROM_LABELS).items()),
    "file:", "every:", "lazy/",
)

VALUES: dict[str, tuple[str, ...]] = {
    "algorithm": tuple(ALGORITHMS), "data": DATA, "model": (*MODELS, "hf:"), "norm": tuple(NORMS),
    "topology": TOPOLOGIES, "partition": ("dirichlet", "dirichlet-plain", "iid", "shards:", "by:"),
    "weights": ("equal", "examples"),
    "device": ("auto", "cpu", "cuda"), "schedule": ("steps", "cosine", "linear", "constant"),
    "loss": tuple(LOSSES), "metric": tuple(BUILT_IN), "train": ("all", "head", "lora:"),
    "algorithms NAME": tuple(ALGORITHMS), "topology GRAPH": TOPOLOGIES, "data NAME": DATA, "partition DATA": DATA,
    "predict DATA": DATA,
}
"""Values of options by name, and of positional arguments by command and name; a command's module may have more."""


def _commands() -> Iterator[Described]:
    """Every command with its options and arguments, from the types of its function or dataclass."""
    for commands in groups().values():
        for name, (module, summary) in commands.items():
            places = vars(import_module(module))
            options: dict[str, Accepted] = {"--help": Accepted(takes=False)}
            words = Accepted()
            values = VALUES | places.get("VALUES", {})
            below = places.get("SUBCOMMANDS", {}).get(name)
            kinds = below.values() if below else [places.get(name.capitalize()) or places[name]]
            for field, hint in (one for kind in kinds for one in _arguments(kind)):
                plain, marks = _plain(hint)
                config = next((mark for mark in marks if hasattr(mark, "metavar")), None)
                if Positional in marks:
                    words = _accepted(f"{name} {config.metavar if config else ''}", plain, values)
                elif plain is bool:
                    flag = (config and config.name) or field.replace("_", "-")
                    options |= {f"--{flag}": Accepted(takes=False), f"--no-{flag}": Accepted(takes=False)}
                else:
                    options[f"--{field.replace('_', '-')}"] = _accepted(field, plain, values)
            if below:
                words = Accepted(tuple(below), files=True)
            yield Described(name, summary, options, words)


def _arguments(kind: Any) -> Iterator[tuple[str, Any]]:
    """Names and annotated types of a command's arguments; those of nested dataclasses are its own."""
    hints = get_type_hints(kind, include_extras=True)
    for name in hints if is_dataclass(kind) else inspect.signature(kind).parameters:
        plain, _ = _plain(hints[name])
        if is_dataclass(plain):
            yield from _arguments(plain)
        else:
            yield name, hints[name]


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without annotations, `None` and tuple, and its annotations."""
    marks: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            marks, hint = (*marks, *hint.__metadata__), hint.__origin__
        elif type(None) in get_args(hint) or get_origin(hint) is tuple:
            hint = get_args(hint)[0]
        else:
            return hint, marks


def _accepted(name: str, plain: Any, values: Mapping[str, tuple[str, ...]]) -> Accepted:
    """The values of an option or argument."""
    if get_origin(plain) is Literal:
        return Accepted(get_args(plain))
    return Accepted(values.get(name, ()), files=plain is Path or name in WITH_FILES)


WITH_FILES = ("data", "predict DATA")
"""Texts that may be files."""


def run(name: str, words: Sequence[str]) -> None:
    """Run this command."""
    call({"completion": completion}, name, words)
