"""`qg completion`: install the completion of commands, options and values in a shell.

The scripts are static: completing starts no Python, which would take seconds to import PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional, arg

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.cli import groups
from quasiglobal.cli.arguments import ExperimentCommand, call
from quasiglobal.cli.terminal import console, say_written
from quasiglobal.common.files import replacing
from quasiglobal.common.own_code import OPTION
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
    commands = [_described(name, *about) for group in groups().values() for name, about in group.items()]
    script = {"bash": bash, "zsh": zsh, "fish": fish}[shell](commands)
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


def run(name: str, words: Sequence[str]) -> None:
    """Run this command."""
    call({"completion": completion}, name, words)


# -------------------------------------------------------------------------------------- the commands

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
    "evaluate DATA": DATA, "predict DATA": DATA,
}
"""Values of options by name, and of positional arguments by command and name; a command's module may have more."""

WITH_FILES = ("data", "evaluate DATA", "predict DATA")
"""Keys of `VALUES` that also accept files."""


@dataclass(frozen=True)
class Accepted:
    """Values of an option or of a command's arguments."""

    words: Sequence[str] = ()
    files: bool = False


@dataclass(frozen=True)
class Described:
    """A command: its line of help, its options, and the values of its arguments."""

    name: str
    summary: str
    options: Mapping[str, Accepted | None]
    """None for a switch, which takes no value."""
    arguments: Accepted


def _described(name: str, module: str, summary: str) -> Described:
    """A command with its options and arguments, from the types of its function or dataclass, or of its subcommands."""
    places = vars(import_module(module))
    values: Mapping[str, Sequence[str]] = VALUES | places.get("VALUES", {})
    below = places.get("SUBCOMMANDS", {}).get(name, {})
    kind = places.get(name.capitalize())
    if not (isinstance(kind, type) and issubclass(kind, ExperimentCommand)):
        kind = places.get(name)
    options: dict[str, Accepted | None] = {"--help": None, OPTION: Accepted()}
    words, files = list(below), bool(below)
    for field, plain, marks in (argument for one in below.values() or [kind] for argument in _arguments(one)):
        said = {"metavar": "", "name": field.replace("_", "-")}
        said |= {key: text for mark in marks for key in said if (text := getattr(mark, key, None))}     # tyro's `arg`
        positional = Positional in marks
        known = f"{name} {said['metavar'].rstrip('.')}" if positional else field
        closed = get_args(plain) if get_origin(plain) is Literal else values.get(known, ())
        accepted = Accepted(closed, files=plain is Path or known in WITH_FILES)
        if plain is bool:
            options |= {f"--{said['name']}": None, f"--no-{said['name']}": None}
        elif not positional:
            options[f"--{said['name']}"] = accepted
        elif not below:                                     # subcommands' arguments: only files are offered
            words, files = [*words, *accepted.words], files or accepted.files
    return Described(name, summary, options, Accepted(words, files))


def _arguments(kind: Callable[..., object]) -> Iterator[tuple[str, object, list[object]]]:
    """Names, types without `None` and tuple, and annotations of a command's arguments and nested dataclasses."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks: list[object] = []
        while get_origin(hint) in (Annotated, tuple) or type(None) in get_args(hint):
            hint, *further = get_args(hint)
            marks += further
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _arguments(hint)
        elif name != "return":
            yield name, hint, marks


# -------------------------------------------------------------------------------------- the scripts


def bash(commands: Sequence[Described]) -> str:
    """The script for bash. A word after a colon, as in folder:PATH, is a file."""
    cases = {f"{one.name} {option}": accepted for one in commands for option, accepted in one.options.items()}
    cases |= {one.name: one.arguments for one in commands}
    cases |= {f"{one.name} -": Accepted(list(one.options)) for one in commands}
    names = " ".join(one.name for one in commands)
    return "\n".join((
        "# bash completion of qg; written by `qg completion bash`",
        "_qg_accepted() {",
        "    case $1 in",
        *(f"        '{case}') words={quote(' '.join(accepted.words))} files={'yes' * accepted.files};;"
          for case, accepted in cases.items() if accepted),
        "        *) return 1;;",
        "    esac",
        "}",
        "_qg() {",
        "    local command=${COMP_WORDS[1]} before=${COMP_WORDS[COMP_CWORD-1]} words= files=",
        "    local word=${COMP_WORDS[COMP_CWORD]}",
        "    if ((COMP_CWORD == 1)); then",
        f"        words='{names} --help --version'",
        "    elif [[ $before == : || $before == = || $word == : ]]; then",
        "        files=yes",
        "        [[ $word == : ]] && word=",
        "    elif [[ $word == -* ]]; then",
        '        _qg_accepted "$command -"',
        "    else",
        '        _qg_accepted "$command $before" || _qg_accepted "$command"',
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "    if [[ -n $files ]]; then",
        "        compopt -o filenames 2>/dev/null",
        "        local IFS=$'\\n'",
        '        COMPREPLY+=($(compgen -f -- "$word"))',
        "    fi",
        "    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[:/] ]] && compopt -o nospace 2>/dev/null",
        "    return 0",
        "}",
        "complete -F _qg qg",
        "",
    ))


def zsh(commands: Sequence[Described]) -> str:
    """The script for zsh."""
    def action(accepted: Accepted | None) -> str:
        if accepted is None:
            return ""
        words = " ".join(word.replace(":", "\\:") for word in accepted.words)
        if words and accepted.files:
            return f":value:{{_alternative 'values:value:({words})' 'files:file:_files'}}"
        return f":value:({words})" if words else f":value:{'_files' if accepted.files else ' '}"

    def specs(one: Described) -> str:
        options = [f"{option}{action(accepted)}" for option, accepted in one.options.items()]
        return join([*options, f"*{action(one.arguments)}"])

    return "\n".join((
        "#compdef qg",
        "# zsh completion of qg; written by `qg completion zsh`",
        "_qg() {",
        f"    local -a commands=({join(f'{one.name}:{one.summary}' for one in commands)})",
        "    if ((CURRENT == 2)); then",
        "        _describe command commands",
        "    else",
        "        shift words; ((CURRENT--))",
        "        case $words[1] in",
        *(f"            {one.name}) _arguments {specs(one)};;" for one in commands),
        "        esac",
        "    fi",
        "}",
        'if [[ $funcstack[1] == _qg ]]; then _qg "$@"; else compdef _qg qg; fi',
        "",
    ))


def fish(commands: Sequence[Described]) -> str:
    """The script for fish."""
    def values(accepted: Accepted) -> str:
        words = f" -a {quote(' '.join(accepted.words))}" if accepted.words else ""
        return words + (" -F" if accepted.files else " -f")

    lines = ["# fish completion of qg; written by `qg completion fish`", "complete -c qg -f"]
    first = "complete -c qg -n 'test (count (commandline -opc)) = 1' -a"
    lines += [f"{first} {one.name} -d {quote(one.summary)}" for one in commands]
    for one in commands:
        when = f"complete -c qg -n 'set -l words (commandline -opc); test \"$words[2]\" = {one.name}'"
        for option, accepted in one.options.items():
            lines.append(f"{when} -l {option.removeprefix('--')}" + (f" -r{values(accepted)}" if accepted else ""))
        if one.arguments.words or one.arguments.files:
            lines.append(f"{when}{values(one.arguments)}")
    return "\n".join((*lines, ""))
