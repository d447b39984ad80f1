"""Every benchmark runs, at a tiny size: `--tiny`. The examples run in test_blocks.py and test_documents.py."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLOW = {"sites.py", "start.py"}
"""Benchmarks that take many seconds even so."""

SCRIPTS = [
    pytest.param(path.name, marks=[pytest.mark.slow] * (path.name in SLOW)) for path in sorted(BENCHMARKS.glob("*.py"))
]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run a script in this process, which has PyTorch already, in an empty folder; return what it prints."""
    def run_script(name, *words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(BENCHMARKS)             # where Python finds what a script imports from another
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out

    yield run_script
    sys.modules.pop("simulator", None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_measures_something_at_a_tiny_size(run, name):
    said = run(name, "--tiny")
    assert re.search(r"\d", said)
    if name == "distributed.py":
        *_, sent, theory = said.split()
        assert sent == theory                               # of the last route, in bytes per step


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turn(run):
    said = run("simulator.py", "--tiny", "--only", "mlp", "--before", str(BENCHMARKS.parent))
    assert re.search(r"after: [\d,]+ images/s .*before: [\d,]+ images/s .* times before", said, re.DOTALL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["simulator.py", "text.py", "zoo.py"])
def test_a_benchmark_for_a_gpu_says_in_one_sentence_that_there_is_none(run, name):
    with pytest.raises(SystemExit, match=r"^there is no GPU here; .* --tiny$"):
        run(name)


def test_the_floor_plan_shows_the_packages_as_they_are(run, tmp_path):
    run("house.py", "--picture", "house.svg")
    plan = (BENCHMARKS.parent / "docs" / "figures" / "house.svg").read_text()
    assert plan == (tmp_path / "house.svg").read_text(), "python benchmarks/house.py --picture docs/figures/house.svg"
