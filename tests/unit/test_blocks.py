"""Code blocks of the documents: Python runs, commands are understood by the real parser, TOML is an experiment."""

import ast
import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from quasiglobal.cli import arguments, module_of
from quasiglobal.training.experiment import from_toml

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "runs" not in page.parts),
]

ELSEWHERE = {
    "README.md": "test_documents.py",
    "docs/your-own.md": "test_documents.py",
    "docs/your-algorithm.md": "test_documents.py",
}
"""Documents whose Python another test runs."""

SLOW = ("docs/index.md", "docs/how-to/use-a-model.md")
"""Documents whose Python trains for seconds."""

SCRIPTS = sorted(page.name for page in (ROOT / "docs" / "tutorials").glob("*.md") if "```text" in page.read_text())
"""Tutorials that show a script and what it prints."""

FOREIGN = {
    "wg": "WireGuard is not installed, and needs root",
    "ip": "changes the network of the machine, and needs root",
    "export": "the shell's own", ".": "the shell's own", "(": "the shell's own",
    "head": "of the system", "tee": "of the system", "tar": "of the system",
}
"""Commands that are not checked, and why."""


class Block(NamedTuple):
    page: str
    language: str
    text: str
    needs: str


def blocks_of(page):
    found = re.findall(
        r"^(?:<!-- needs (\w+) -->\n)?( *)```(\w*)\n(.*?)^\2```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    name = page.relative_to(ROOT).as_posix()
    return [Block(name, language, textwrap.dedent(text), needs) for needs, _, language, text in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(block):
    """The commands of a block: with continued lines, without comments, prompts, assignments and output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        command = []
        shell = shlex.shlex(line, posix=True, punctuation_chars=True)
        shell.whitespace_split = True
        for word in [*shell, ";"]:
            if word in (";", "&&", "|"):
                while command and re.match(r"\w+=", command[0]):
                    command.pop(0)
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def all_commands(*names):
    return [
        pytest.param(command, id=f"{block.page}: {shlex.join(command)}"[:100])
        for block in BLOCKS if block.language in ("bash", "console") and "--8<--" not in block.text
        for command in commands_of(block) if command[0] in names
    ]


class Understood(Exception):
    """Raised in place of running a command."""


@pytest.fixture
def understand(tmp_path, monkeypatch):
    """Parse a `qg` command, with files in place of the reader's own, and stop before it runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("exp.toml", "mine.toml"):
        Path(name).write_text("lr = 0.2\n")
    Path("mine.py").write_text("def Net(): pass\ndef data(): pass\ndef loss(): pass\ndef error(): pass\n")
    real = arguments.tyro.cli

    def only_parse(f, **given):
        if isinstance(f, type):
            parsed = real(f, **given)
            if not isinstance(parsed.experiment, arguments.Draft):
                raise Understood
            return parsed

        @functools.wraps(f)
        def stop(*args, **options):
            raise Understood

        return real(stop, **given)

    monkeypatch.setattr(arguments.tyro, "cli", only_parse)

    def check(words):
        with pytest.raises(Understood):
            import_module(module_of(words[0])).run(words[0], words[1:])

    return check


def test_every_block_says_what_it_is():
    known = {"python", "toml", "bash", "console", "text", "yaml", "ini", "dockerfile"}
    assert [(block.page, block.text[:40]) for block in BLOCKS if block.language not in known] == []


def test_every_command_is_ours_or_has_a_reason():
    checked = {"qg", "make", "python", "python3", "torchrun", "pip", "bash"}
    used = {
        command[0] for block in BLOCKS if block.language in ("bash", "console") and "--8<--" not in block.text
        for command in commands_of(block)
    }
    assert used - checked <= set(FOREIGN)


def test_the_commands_are_understood(understand):
    commands = [param.values[0] for param in all_commands("qg")]
    assert len(commands) > 50
    for command in commands:
        understand(command[1:])


def test_the_commands_of_services_are_understood(understand):
    unit, container = ((ROOT / "examples" / "services" / name).read_text()
                       for name in ("quasiglobal-node.service", "Containerfile"))
    started = [*re.findall(r"^ExecStart=\S+/qg (.*)$", unit, re.M), *re.findall(r"^#   qg (.*)$", container, re.M)]
    assert len(started) == 3
    for words in started:
        understand(shlex.split(words))


def test_what_other_commands_name_exists(understand):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for (command,) in (param.values for param in all_commands("make", "python", "python3", "pip", "torchrun", "bash")):
        if command[0] == "make":
            assert set(command[1:]) <= targets
        elif command[0] == "pip":
            assert command[1] == "install"
            assert set(re.findall(r"\[(\w+)\]", " ".join(command))) <= extras
        elif "-m" in command:
            module, *words = command[command.index("-m") + 1 :]
            assert find_spec(module)
            if module == "quasiglobal":
                understand(words)
        else:
            script = next(word for word in command if word.endswith((".py", ".sh")))
            assert script == "train.py" or (ROOT / script).exists()         # train.py is the reader's own


def test_the_toml_is_an_experiment(tmp_path):
    told = [block for block in BLOCKS if block.language == "toml"]
    assert told
    for block in told:
        (tmp_path / "told.toml").write_text(block.text)
        assert from_toml(tmp_path / "told.toml").topology == "ring:4"


def test_all_python_runs_somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = [block for block in BLOCKS if block.language == "python"]
    for block in shown:
        if "--8<--" in block.text:
            (script,) = re.findall(r'--8<-- "(.*?)"', block.text)
            assert Path(script).name in {*RUN, "torchrun_digits.py", "four_hospitals.py"}
        elif block.needs:
            ast.parse(block.text)                           # docs/your-own.md says what it needs
        elif block.page not in {*ELSEWHERE, *SLOW}:
            exec(block.text, {})                            # short
    assert {block.page for block in shown} >= {*ELSEWHERE, *SLOW}


def test_every_output_is_somebodys():
    with_text = {block.page for block in BLOCKS if block.language == "text"}
    ran = {f"docs/tutorials/{name}" for name in SCRIPTS}
    guide = "docs/how-to/federation.md"                     # tests/unit/test_federation.py runs it
    assert with_text == {"README.md", "docs/index.md", guide, *ran}


RUN = {}
for _name in SCRIPTS:
    _text = (ROOT / "docs" / "tutorials" / _name).read_text()
    _shown = re.search(r'```python\n--8<-- "examples/(.*?)"\n```\n\n```text\n(.*?)```', _text, re.DOTALL)
    RUN[_shown[1]] = _shown[2]


LONG = ("natural_clients.py", "own_images.py")
"""Tutorials that take longest."""


def environment():
    """The environment of a reader's terminal: this Python's commands on the path, and 100 columns."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("script", [
    pytest.param(script, marks=[pytest.mark.slow] * (script in LONG)) for script in RUN
])
def test_a_tutorial_prints_what_its_page_says(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert capsys.readouterr().out == RUN[script]


OTHERS = {
    "own_model.py": "test_documents.py", "quickstart.py": "test_documents.py",
    "four_hospitals.sh": "docs/tutorials/hospitals.md", "four_hospitals.py": "four_hospitals.sh",
    "torchrun_digits.py": "docs/tutorials/torchrun.md", "notes.py": "docs/text.md",
    "curious_neighbour.py": "tests/distributed/test_curious.py",
}
"""Examples whose page has no output below them, and what runs them."""


def test_every_example_runs_somewhere():
    assert {path.name for path in (ROOT / "examples").glob("*.[ps][yh]")} == {*RUN, *OTHERS}


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_the_python_of_a_page_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    blocks = [block for block in BLOCKS if block.page == page and block.language in ("python", "text")]
    for block in blocks:
        if block.language == "python":
            exec(compile(block.text, page, "exec"), names)
            said = capsys.readouterr().out
        else:
            assert said == block.text


MEASURED = r"(?<=loss )\d+\.\d+|\d+\.\d+(?=%)|(?<=│ )\d+\.\d+(?= +│)"
"""Losses and accuracies in a terminal. They depend on the order of the processor's sums, and with it on its type."""

ACCURACY, LOSS = 1.0, 0.005
"""How far they may be off: those of docs/index.md differ by 0.6 points and 0.001 between AVX-512, AVX2 and SSE."""


def expected(text):
    """The commands of a console block, each with what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output.strip("\n")


def assert_shown(shown, said):
    """Compare output with a page's: … there stands for any lines, a rate for any, a measured number for one near it."""
    lines = [
        "(?s:.*)" if line == "…" else r"(\d+\.\d+)".join(map(re.escape, re.split(MEASURED, line)))
        for line in shown.split("\n")
    ]
    pattern = re.sub(r"[\d,]+\\ examples/s", r"[\\d,]+ examples/s", "\n".join(lines))
    found = re.fullmatch(pattern, said.strip("\n"))
    assert found, said
    for match, value in zip(re.finditer(MEASURED, shown), found.groups(), strict=True):
        off = LOSS if shown[: match.start()].endswith("loss ") else ACCURACY
        assert float(value) == pytest.approx(float(match[0]), abs=off, rel=0), said


def test_a_result_may_be_near_the_one_shown_and_a_setting_may_not():
    shown = "learning rate 0.1\n…\nloss 0.034  accuracy 95.7%, 1,695 examples/s\n│ ring │ 95.66 │"
    assert_shown(shown, shown.replace("…", "one\ntwo").replace("1,695", "7").replace("95.66", "94.91"))
    for one, other in (("0.1", "0.2"), ("0.034", "0.040"), ("95.7", "94.6"), ("95.66", "96.70"), ("ring", "star")):
        with pytest.raises(AssertionError):
            assert_shown(shown, shown.replace(one, other))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/index.md", "docs/text.md", "docs/tutorials/hospitals.md"])
def test_a_terminal_shows_what_the_page_says(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if page == "docs/text.md":
        pytest.importorskip("transformers", reason="needs the extra nlp")
        subprocess.run([sys.executable, "examples/notes.py", "."], cwd=tmp_path, check=True, capture_output=True)
    consoles = [block for block in BLOCKS if block.page == page and block.language == "console"]
    assert consoles
    for block in consoles:
        for command, shown in expected(block.text):
            ran = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=300,
            )
            assert_shown(shown, ran.stdout)


@pytest.mark.slow
def test_torchrun_prints_what_the_tutorial_says(tmp_path):
    (block,) = (
        block for block in BLOCKS if block.page == "docs/tutorials/torchrun.md" and block.language == "console"
    )
    ((command, shown),) = expected(block.text)
    ran = subprocess.run(command, shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    line = r"(node \d trained on digits \[[\d, ]*\] and reads) ([\d.]+)% of all ten"     # torchrun may join lines
    said, wanted = (dict(re.findall(line, text)) for text in (ran.stdout, shown))
    assert said.keys() == wanted.keys(), ran.stderr
    assert len(set(said.values())) == 1                     # the same model for all
    assert float(said.popitem()[1]) > 85                    # the batches have no seed
