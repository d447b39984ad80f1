"""The command line as a person meets it."""

import subprocess
import sys

import pytest

from quasiglobal import cli


def qg(*words):
    command = [sys.executable, "-m", "quasiglobal", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def inside(monkeypatch, capsys, *words):
    """The same, in this process: quicker."""
    monkeypatch.setattr(sys, "argv", ["qg", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as exit:
        status = exit.code
    out = capsys.readouterr()
    return status, out.out, out.err


def test_help_lists_the_commands():
    done = qg("--help")
    assert done.returncode == 0
    for command in ("demo", "topology", "algorithms", "reproduce"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["demo", "topology", "algorithms", "reproduce"])
def test_each_command_explains_itself(monkeypatch, capsys, command):
    status, out, _ = inside(monkeypatch, capsys, command, "--help")
    assert status == 0
    assert "usage: qg " + command in out


def test_topology_prints_its_facts_and_draws(monkeypatch, capsys, tmp_path):
    file = tmp_path / "ring.svg"
    status, out, _ = inside(monkeypatch, capsys, "topology", "ring:16", "--plot", str(file))
    assert status == 0
    for fact in ("0.0989187", "-0.333333", "0.949253", "0.00468833", "2.180 MB"):
        assert fact in out
    assert "<svg" in file.read_text()


def test_a_directed_topology_is_drawn_too(monkeypatch, capsys, tmp_path):
    file = tmp_path / "graph.png"
    status, out, _ = inside(monkeypatch, capsys, "topology", "one-peer-exponential:6", "--plot", str(file))
    assert status == 0
    assert "directed" in out
    assert file.exists()


BAD = {
    ("topology", "ring:2"): "qg: ring needs n >= 3, got 2; use complete(2)",
    ("topology", "ring:4", "--plot", "graph.doc"): "qg: cannot draw into graph.doc; end its name with .png",
    ("topology", "ring:4", "--plot", "/proc/graph.png"): "qg: cannot write /proc/graph.png",
    ("topology", "file:no-such-file"): "qg: cannot read the edge list no-such-file",
    ("algorithms", "qg-dsgd"): "qg: unknown algorithm 'qg-dsgd'; did you mean 'qg-dsgdm'?",
    ("reproduce", "figure-3d"): "qg: unknown figure 'figure-3d'; did you mean 'figure-2d'?",
    ("algorithms", "mimelite:participation=0.5", "--check"): "qg: MimeLite failed 1 of 12 checks",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_is_one_sentence_and_status_2(monkeypatch, capsys, words):
    status, out, err = inside(monkeypatch, capsys, *words)
    assert status == 2
    assert err.startswith(BAD[words])
    assert "Traceback" not in out + err


def test_no_stack_trace_from_a_real_process(tmp_path):
    (tmp_path / "two").write_text("0 1\n2 3\n")
    done = qg("topology", f"file:{tmp_path}/two")
    assert done.returncode == 2
    assert done.stderr == (
        f"qg: file:{tmp_path}/two is not connected: it falls into 2 parts that never hear of each other; "
        "add an edge\n"
    )
    done = qg("topologi")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_algorithms_lists_and_explains(monkeypatch, capsys):
    _, table, _ = inside(monkeypatch, capsys, "algorithms", "--markdown")
    assert "| `qg-dsgdm-n` | 1 | 1 | doubly stochastic | Lin et al. 2021 |" in table
    _, plain, _ = inside(monkeypatch, capsys, "algorithms")
    assert "qg-dsgdm-n" in plain
    _, text, _ = inside(monkeypatch, capsys, "algorithms", "slowmo:tau=6")
    assert "Wang et al. 2020" in text
    assert "1 + 1/6 to all" in text
    status, text, _ = inside(monkeypatch, capsys, "algorithms", "qg-dsgdm", "--check")
    assert status == 0
    assert "passed 12 checks" in text


def test_reproduce_lists_and_makes(monkeypatch, capsys, tmp_path):
    _, listed, _ = inside(monkeypatch, capsys, "reproduce")
    assert "figure-rosenbrock" in listed
    status, out, _ = inside(monkeypatch, capsys, "reproduce", "figure-topology", "--out", str(tmp_path))
    assert status == 0
    assert "89 edges" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".csv"}
