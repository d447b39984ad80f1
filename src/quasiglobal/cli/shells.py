"""Completion scripts of bash, zsh and fish, from one description of the commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


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
