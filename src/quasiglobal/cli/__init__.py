"""The command line, `qg`: one module per group of commands, imported on demand.

`qg --help`, `qg --version` and the error for a mistyped command need no PyTorch, so this file does not import it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import warnings
from importlib import import_module
from importlib.metadata import entry_points
from textwrap import dedent, fill
from typing import NoReturn, TextIO

import quasiglobal
from quasiglobal.errors import InputError, printable, unknown

CommandGroups = dict[str, dict[str, tuple[str, str]]]
"""Titles of groups, and in each group the commands: its module, and its line in `qg --help`."""

OWN: CommandGroups = {
    "Train": {
        "train": ("quasiglobal.cli.train", "Train one model per node, or resume a run."),
        "tune": ("quasiglobal.cli.train", "Tune the learning rate or other hyperparameters."),
        "node": ("quasiglobal.cli.train", "Run one node of an experiment on your own data."),
        "rendezvous": ("quasiglobal.cli.train", "Serve the store where processes find each other."),
    },
    "Between sites": {
        "federation": ("quasiglobal.cli.federation", "For the organiser: found a federation and approve its sites."),
        "site": ("quasiglobal.cli.federation", "For each site: request to join a federation, install its file."),
    },
    "Look": {
        "runs": ("quasiglobal.cli.look", "List the runs and their status."),
        "compare": ("quasiglobal.cli.look", "Print a table of runs, mean ± std over seeds."),
        "plot": ("quasiglobal.cli.look", "Draw the learning curves of runs."),
        "status": ("quasiglobal.cli.look", "Show the progress of each process of a distributed run."),
    },
    "Share": {
        "export": ("quasiglobal.cli.share", "Write a run's model into a self-contained folder."),
        "evaluate": ("quasiglobal.cli.share", "Test an exported model on labelled data."),
        "predict": ("quasiglobal.cli.share", "Predict for images, tables or texts without labels."),
    },
    "Set up": {
        "check": ("quasiglobal.cli.train", "Estimate the cost of a training and report likely problems."),
        "algorithms": ("quasiglobal.cli.explain", "List the algorithms, or explain one."),
        "topology": ("quasiglobal.cli.explain", "List the topologies, or print one's spectral properties and traffic."),
        "data": ("quasiglobal.cli.explain", "List the data sets, or describe one."),
        "partition": ("quasiglobal.cli.explain", "Show how a partition splits the data among nodes."),
        "completion": ("quasiglobal.cli.completion", "Install the completion of commands and options in a shell."),
    },
}
"""The commands of the library: the module of each, and its line in `qg --help`."""

REGISTERED = "quasiglobal.commands"
"""Entry points of packages that add commands: each is a `CommandGroups`, from a module that imports little."""


def groups() -> CommandGroups:
    """All commands by group; those of other packages come before the library's last group."""
    found: CommandGroups = {}
    for point in sorted(entry_points(group=REGISTERED)):
        for title, commands in point.load().items():
            found.setdefault(title, {}).update(commands)
    *first, last = OWN
    return {title: OWN[title] for title in first} | found | {last: OWN[last]}


def module_of(command: str) -> str:
    """The module of a command; other packages are searched only for commands that the library does not have."""
    own = modules(OWN)
    if command in own:
        return own[command]
    everyone = modules(groups())
    if command not in everyone:
        raise unknown("command", command, everyone)
    return everyone[command]


def modules(found: CommandGroups) -> dict[str, str]:
    """The module of each command."""
    return {name: module for commands in found.values() for name, (module, _) in commands.items()}


def main() -> None:
    """Run `qg`. Bad input prints one sentence and exits with status 2, without a stack trace."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # once for all processes of a run
            print("qg: stopped; run the same command again to resume", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                     # the reader closed the pipe, as in `qg algorithms | head`
        discard_output()
    except OSError as error:
        discard_output()
        _refuse(error.strerror or error)
    except InputError as error:
        _refuse(error)
    except MemoryError as error:
        _refuse(f"not enough memory ({error}); use a smaller --batch or fewer --steps")
    except Exception as error:
        if not isinstance(error, quasiglobal.CheckFailed | quasiglobal.Diverged):
            raise
        _refuse(error)


def _run(words: list[str]) -> None:
    """Print the help or the version without PyTorch, or run a command."""
    if not words or words[0] in ("-h", "--help"):
        print(_help())
    elif words[0] == "--version":
        print(f"qg {quasiglobal.__version__}")
    else:
        module = module_of(words[0])
        if os.environ.get("NO_COLOR"):          # tyro reads this when it is imported
            os.environ["PYTHON_TYRO_ANSI_CODES"] = "False"
        terminal = import_module("quasiglobal.cli.terminal")
        warnings.showwarning = terminal.show_warning
        terminal.console.stderr = "--json" in words     # standard output holds the document alone
        own_code = import_module("quasiglobal.common.own_code")
        rest, allowed = without(own_code.OPTION, words[1:])
        with own_code.only_given(allowed):
            import_module(module).run(words[0], rest)


def without(option: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The words without an option that every command has, and the option's values.

    >>> without("--allow-code", ["--lr", "0.1", "--allow-code", "mine", "--allow-code=yours"])
    (['--lr', '0.1'], ['mine', 'yours'])
    """
    rest: list[str] = []
    values: list[str] = []
    left = iter(words)
    for word in left:
        if word == option:
            values.append(next(left, ""))
        elif word.startswith(f"{option}="):
            values.append(word.removeprefix(f"{option}="))
        else:
            rest.append(word)
    return rest, values


def _help() -> str:
    """List all commands by group."""
    about = (quasiglobal.__doc__ or "").splitlines()[0]
    lines = [f"usage: qg COMMAND [OPTIONS]\n\n{fill(about, 79)}"]
    for title, commands in groups().items():
        lines.append(f"\n{title}")
        lines += [f"  {name:<11} {summary}" for name, (_, summary) in commands.items()]
    lines.append(dedent("""
        `qg COMMAND --help` explains one command.
          --json      On every command that prints a table: one JSON document.
          --allow-code PACKAGE.MODULE
                      On every command: let names in files import this module of yours.
          --help      Show this list.
          --version   Print the version."""))
    return "\n".join(lines)


def _refuse(why: object) -> NoReturn:
    """Print the error and exit with status 2."""
    print(wrapped(printable(f"qg: {why}"), sys.stderr), file=sys.stderr)
    sys.exit(2)


def discard_output() -> None:
    """Redirect standard output, including its buffer, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wrapped(text: str, to: TextIO | None = None, narrower: int = 0) -> str:
    """Wrap text at the width of the terminal; output to a file or a pipe stays as it is.

    Indented lines, such as equations, stay lines; the other lines of a paragraph are joined.
    """
    if not (to or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns - narrower
    return "\n\n".join(_paragraph(one, width) for one in text.split("\n\n"))


def _paragraph(text: str, width: int) -> str:
    if not re.search(r"^\s", text, re.MULTILINE):
        return fill(text, width)
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(fill(line, width, subsequent_indent=f"{indent}    ") if len(line) > width else line)
    return "\n".join(lines)
