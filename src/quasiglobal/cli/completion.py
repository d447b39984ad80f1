"""`qg completion`: install the completion of commands, options and values in a shell.

The scripts are static: completing starts no Python, which would take seconds to import PyTorch.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional, arg

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.cli import groups
from quasiglobal.cli.arguments import call
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
            for field, plain, marks in (one for kind in kinds for one in _arguments(kind)):
                if Positional in marks:
                    words = _accepted(f"{name} {_said(marks, 'metavar')}", plain, values)
                elif plain is bool:
                    flag = _said(marks, "name") or field.replace("_", "-")
                    options |= {f"--{flag}": Accepted(takes=False), f"--no-{flag}": Accepted(takes=False)}
                else:
                    options[f"--{field.replace('_', '-')}"] = _accepted(field, plain, values)
            if below:
                words = Accepted(tuple(below), files=True)
            yield Described(name, summary, options, words)


def _arguments(kind: Callable[..., object]) -> Iterator[tuple[str, object, list[object]]]:
    """Names, types and annotations of a command's arguments; those of nested dataclasses are its own."""
    hints = get_type_hints(kind, include_extras=True)
    for name in hints if is_dataclass(kind) else inspect.signature(kind).parameters:
        plain, marks = _plain(hints[name])
        if isinstance(plain, type) and is_dataclass(plain):
            yield from _arguments(plain)
        else:
            yield name, plain, marks


def _plain(hint: object) -> tuple[object, list[object]]:
    """The type without annotations, `None` and tuple, and its annotations."""
    marks: list[object] = []
    while True:
        if get_origin(hint) is Annotated:
            hint, *further = get_args(hint)
            marks += further
        elif type(None) in get_args(hint) or get_origin(hint) is tuple:
            hint = get_args(hint)[0]
        else:
            return hint, marks


def _said(marks: Sequence[object], what: str) -> str:
    """The metavar or the name in tyro's `arg` among the annotations; empty without it."""
    return next((said for mark in marks if isinstance(said := getattr(mark, what, None), str)), "")


def _accepted(name: str, plain: object, values: Mapping[str, tuple[str, ...]]) -> Accepted:
    """The values of an option or argument."""
    if get_origin(plain) is Literal:
        return Accepted(get_args(plain))
    return Accepted(values.get(name, ()), files=plain is Path or name in WITH_FILES)


WITH_FILES = ("data", "predict DATA")
"""Texts that may be files."""


def run(name: str, words: Sequence[str]) -> None:
    """Run this command."""
    call({"completion": completion}, name, words)


# -------------------------------------------------------------------------------------- the scripts


@dataclass(frozen=True)
class Accepted:
    """Values of an option or of a command's arguments."""

    words: tuple[str, ...] = ()
    files: bool = False
    takes: bool = True
    """Whether there is a value; a switch has none."""


@dataclass(frozen=True)
class Described:
    """A command: its line of help, its options, and the values of its arguments."""

    name: str
    summary: str
    options: Mapping[str, Accepted]
    arguments: Accepted


def bash(commands: Sequence[Described]) -> str:
    """The script for bash. A word after a colon, as in folder:PATH, is a file."""
    def found(accepted: Accepted) -> str:
        words = f"words={shlex.quote(' '.join(accepted.words))}" if accepted.words else ""
        return "; ".join(filter(None, (words, "files=yes" if accepted.files else ""))) or ":"

    values = [
        f"{' ' * 12}'{one.name}{option}') {found(accepted)};;"
        for one in commands for option, accepted in one.options.items() if accepted.takes
    ]
    arguments = [f"{' ' * 16}{one.name}) {found(one.arguments)};;" for one in commands]
    options = [f"{' ' * 12}{one.name}) words={shlex.quote(' '.join(one.options))};;" for one in commands]
    names = " ".join(one.name for one in commands)
    return "\n".join((
        "# bash completion of qg; written by `qg completion bash`",
        "_qg() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words= files=",
        "    if ((COMP_CWORD == 1)); then",
        f"        words='{names} --help --version'",
        "    elif [[ $before == : || $before == = || $word == : ]]; then",
        "        files=yes",
        "        [[ $word == : ]] && word=",
        "    else",
        "        case ${COMP_WORDS[1]}$before in",
        *values,
        "            *) [[ $word == -* ]] || case ${COMP_WORDS[1]} in",
        *arguments,
        "            esac;;",
        "        esac",
        "        [[ $word == -* ]] && case ${COMP_WORDS[1]} in",
        *options,
        "        esac",
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
    def action(accepted: Accepted) -> str:
        words = " ".join(word.replace(":", "\\:") for word in accepted.words)
        if accepted.words and accepted.files:
            return f":value:{{_alternative 'values:value:({words})' 'files:file:_files'}}"
        return f":value:({words})" if words else f":value:{'_files' if accepted.files else ' '}"

    def specs(one: Described) -> str:
        options = [f"{option}{action(accepted) if accepted.takes else ''}" for option, accepted in one.options.items()]
        return " ".join(_in_quotes(spec) for spec in (*options, f"*{action(one.arguments)}"))

    lines = [f"            {one.name}) _arguments {specs(one)};;" for one in commands]
    names = " ".join(_in_quotes(f"{one.name}:{one.summary}") for one in commands)
    return "\n".join((
        "#compdef qg",
        "# zsh completion of qg; written by `qg completion zsh`",
        "_qg() {",
        f"    local -a commands=({names})",
        "    if ((CURRENT == 2)); then",
        "        _describe command commands",
        "    else",
        "        shift words; ((CURRENT--))",
        "        case $words[1] in",
        *lines,
        "        esac",
        "    fi",
        "}",
        'if [[ $funcstack[1] == _qg ]]; then _qg "$@"; else compdef _qg qg; fi',
        "",
    ))


def fish(commands: Sequence[Described]) -> str:
    """The script for fish."""
    def values(accepted: Accepted) -> str:
        words = f" -a {_in_quotes(' '.join(accepted.words))}" if accepted.words else ""
        return words + (" -F" if accepted.files else " -f")

    lines = ["# fish completion of qg; written by `qg completion fish`", "complete -c qg -f"]
    first = "complete -c qg -n 'test (count (commandline -opc)) = 1' -a"
    lines += [f"{first} {one.name} -d {_in_quotes(one.summary)}" for one in commands]
    for one in commands:
        when = f"complete -c qg -n 'set -l words (commandline -opc); test \"$words[2]\" = {one.name}'"
        for option, accepted in one.options.items():
            taken = f" -r{values(accepted)}" if accepted.takes else ""
            lines.append(f"{when} -l {option.removeprefix('--')}{taken}")
        if one.arguments.words or one.arguments.files:
            lines.append(f"{when}{values(one.arguments)}")
    return "\n".join((*lines, ""))


def _in_quotes(text: str) -> str:
    """Text in single quotes, for all three shells."""
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS: dict[str, Callable[[Sequence[Described]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
