"""Completion of commands, options and values, in the shells themselves."""

import shutil
import subprocess

import pytest
from terminal import inside

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.cli import groups, modules
from quasiglobal.reproduction.paper.reproduce import TARGETS


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder with the completion of every shell."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "notes.csv").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
            patch.delenv(name, raising=False)
        for shell in ("bash", "zsh", "fish"):
            assert inside(patch, Nothing(), "completion", shell)[0] == 0
    return folder


class Nothing:
    out = err = ""

    def readouterr(self):
        return self


def bash(home, *words):
    """The completions of the last word."""
    file = home / ".local/share/bash-completion/completions/qg"
    line = " ".join(f"'{word}'" for word in words)
    script = f"source {file}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _qg; printf '%s\\n' "
    script += '"${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=home, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def fish(home, *words):
    file = home / ".config/fish/completions/qg.fish"
    command = f"source {file}; complete -C '{' '.join(words)}'"
    done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, cwd=home, check=True)
    assert done.stderr == ""
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("ask", [
    pytest.param(bash, marks=pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")),
    pytest.param(fish, marks=pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish here")),
])  # fmt: skip
def test_a_shell_completes_commands_options_values_and_files(home, ask):
    assert set(modules(groups())) <= set(ask(home, "qg", ""))
    assert {"--epochs", "--no-tensorboard", "--data-dir"} <= set(ask(home, "qg", "train", "--"))
    assert "--epochs" not in ask(home, "qg", "plot", "--")
    assert set(ALGORITHMS) <= set(ask(home, "qg", "train", "--algorithm", ""))
    assert {"simulator", "distributed"} <= set(ask(home, "qg", "train", "--engine", ""))
    assert {name for name in TARGETS if name.startswith("fig")} <= set(ask(home, "qg", "reproduce", "fig"))
    assert "notes.csv" in ask(home, "qg", "plot", "--out", "")
    assert "notes.csv" not in ask(home, "qg", "train", "--epochs", "")


def test_a_bash_word_after_a_colon_is_a_file(home):
    assert bash(home, "qg", "train", "--data", "csv", ":", "no") == ["notes.csv"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh here")
def test_zsh_reads_its_file(home):
    file = home / ".local/share/zsh/site-functions/_qg"
    assert file.read_text().startswith("#compdef qg\n")
    subprocess.run(["zsh", "-n", file], check=True)
