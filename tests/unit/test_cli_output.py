"""Output of the command line: JSON, narrow terminals, no colours; and bad input of every kind."""

import json
import os
import pty
import sys

import pytest
from terminal import inside

from quasiglobal.cli.terminal import console
from quasiglobal.runs.checkpoints import Part
from quasiglobal.runs.store import RunFolder
from quasiglobal.training.experiment import Experiment


def leave_runs(root, count, **changes):
    """Write finished runs that differ in their batch."""
    for k in range(count):
        run = RunFolder.of(Experiment(epochs=1, batch=k + 1, **changes), root)
        run.describe()
        run.rewrite([{"epoch": 1, "loss": 1.0, "accuracy": 0.5, "accuracy_worst": 0.25}])
        run.finish("finished", {})
        yield str(run.folder)


def said(monkeypatch, capsys, *words):
    status, out, _ = inside(monkeypatch, capsys, *words, "--json")
    assert status == 0
    return json.loads(out)


def test_json_has_raw_numbers_and_nothing_else_is_on_standard_output(monkeypatch, capsys, tmp_path):
    (folder,) = leave_runs(tmp_path, 1)
    (run,) = said(monkeypatch, capsys, "runs", str(tmp_path))
    assert (run["status"], run["score"], run["epoch"]) == ("finished", 0.5, 1)
    (setting,) = said(monkeypatch, capsys, "compare", folder)
    assert (setting["score"], setting["worst_node"], setting["averaged_model"]) == (0.5, 0.25, None)
    assert setting["runs"] == [folder]
    graph = said(monkeypatch, capsys, "topology", "ring:4", "--plot", str(tmp_path / "ring.svg"))
    assert graph["rho"] == pytest.approx(8 / 9)
    assert {row["name"] for row in said(monkeypatch, capsys, "algorithms")} >= {"dsgd", "qg-dsgdm-n"}
    assert said(monkeypatch, capsys, "algorithms", "qg-dsgdm-n")["options"]["beta"] == 0.9
    assert {row["name"] for row in said(monkeypatch, capsys, "data")} >= {"digits", "agnews"}
    assert said(monkeypatch, capsys, "data", "digits")["train"] == 1437
    one, two = said(monkeypatch, capsys, "partition", "digits", "--alpha", "0.1", "1")
    assert one["label_entropy_nats"] < two["label_entropy_nats"]
    (target,) = said(monkeypatch, capsys, "reproduce", "figure-2d", "--list", "--runs", str(tmp_path))
    assert (target["number"], target["cells"]) == ("Figures 2 and 11", None)


@pytest.mark.slow
def test_json_of_a_check_a_tuning_and_a_table_of_the_paper(monkeypatch, capsys, tmp_path):
    small = ("--model", "mlp", "--topology", "ring:4", "--epochs", "1", "--steps", "1", "--runs", str(tmp_path))
    assert said(monkeypatch, capsys, "check", *small)["parameters"] == 26_122
    tuned = said(monkeypatch, capsys, "tune", *small, "--over", "lr=0.1,0.2", "--cap", "2")
    assert {trial["lr"] for trial in tuned["trials"]} == {0.1, 0.2}
    assert tuned["best"]["lr"] in (0.1, 0.2)
    table = ("reproduce", "single-worker", "--scale", "smoke", "--runs", str(tmp_path), "--seeds", "1")
    (cell,) = said(monkeypatch, capsys, *table, "--cells", "SGDm | BN")
    assert (cell["paper_percent"], cell["seeds"], cell["difference_percent"]) == (92.90, 1, None)
    assert 0 < cell["ours_percent"] <= 100


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_has_lines_instead_of_a_broken_table(monkeypatch, capsys, tmp_path, columns):
    monkeypatch.setattr(console, "_width", columns)
    folders = list(leave_runs(tmp_path, 2, model="mlp", algorithm="dsgdm-n:sync=momentum,over=all"))
    for words in (["runs", str(tmp_path)], ["compare", *folders], ["algorithms"]):
        status, out, _ = inside(monkeypatch, capsys, *words)
        assert status == 0
        assert max(map(len, out.splitlines())) <= columns
        assert "…" not in out
    _, out, _ = inside(monkeypatch, capsys, "compare", *folders)
    assert columns == 80 or "  worst node:     25.00" in out


def test_the_status_of_16_processes_fits_80_columns(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(console, "_width", 80)
    run = RunFolder.of(Experiment(epochs=9), tmp_path)
    run.describe()
    for process in range(16):
        part = Part(run.folder, process, [process])
        part.begin(0)
        edges = {str(there): {"sent": 10**9, "waited": 100.25} for there in ((process - 1) % 16, (process + 1) % 16)}
        edges["9"] = {"sent": 0, "waited": 0, "clipped": 7} if process == 8 else {"sent": 0, "waited": 0, "clipped": 0}
        lost = {"4": "it did not answer in time"} if process == 5 else {}
        loss = [None] if process == 7 else [0.5]
        if process != 3:
            part.write({"epoch": 2, "step": 20 - process, "loss": loss, "edges": edges, "lost": lost, "written": 1e9})
    status, out, _ = inside(monkeypatch, capsys, "status", str(run.folder))
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0:2] == ["process 0", "nodes 0: training, epoch 2, step 20, loss 0.500"]
    assert lines[2].startswith("sent 2 GB, waited 200.5 s, updated ")
    assert "nodes 3: training, before its first epoch" in lines
    assert "nodes 7: training, epoch 2, step 13, 7 behind, loss not finite" in lines
    assert "lost the edge to 4: it did not answer in time" in lines
    assert [line for line in lines if "clipped" in line] == ["clipped models of 9: 7"]
    rows = said(monkeypatch, capsys, "status", str(run.folder))
    assert rows[5]["lost"] == {"4": "it did not answer in time"}
    assert (rows[8]["clipped"], rows[5]["clipped"]) == ({"9": 7}, {})
    assert (rows[5]["sent_bytes"]["6"], rows[3]["step"]) == (10**9, None)


@pytest.mark.slow
def test_no_color_leaves_no_escape_code_on_a_terminal(tmp_path):
    (tmp_path / "runs").mkdir()
    list(leave_runs(tmp_path / "runs", 1))
    for words, shown in ((["runs", str(tmp_path / "runs")], "finished"), (["plot", "--nothing"], "--nothing")):
        assert "\x1b" in on_terminal(words, {})
        plain = on_terminal(words, {"NO_COLOR": "1"})
        assert shown in plain
        assert "\x1b" not in plain


def on_terminal(words, environment):
    """The output of `qg` in a pseudo-terminal."""
    pid, terminal = pty.fork()
    if not pid:                                                         # the child
        os.environ.pop("NO_COLOR", None)
        os.environ.update({"TERM": "xterm-256color", **environment})
        os.execv(sys.executable, [sys.executable, "-m", "quasiglobal", *words])
    text = b""
    try:
        while more := os.read(terminal, 4096):
            text += more
    except OSError:                                                     # the child has closed the terminal
        pass
    os.waitpid(pid, 0)
    return text.decode()


def test_a_plot_of_too_many_curves_is_refused(monkeypatch, capsys, tmp_path):
    folders = list(leave_runs(tmp_path, 13))
    status, _, err = inside(monkeypatch, capsys, "plot", *folders, "--out", str(tmp_path / "curves.png"))
    assert (status, "13 curves in one plot are too many; name at most 12" in err) == (2, True)
    assert inside(monkeypatch, capsys, "plot", *folders[:12], "--out", str(tmp_path / "curves.png"))[0] == 0


def test_the_report_says_what_it_leaves_out(monkeypatch, capsys, tmp_path):
    run = RunFolder.of(Experiment(), tmp_path / "runs")
    run.describe()
    words = ("report", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--format", "latex")
    status, out, _ = inside(monkeypatch, capsys, *words)
    assert (status, "not shown: 1 unfinished runs" in out) == (0, True)


def test_the_check_of_owners_data_says_what_it_does_not_know(monkeypatch, capsys, tmp_path):
    file = tmp_path / "owners.toml"
    file.write_text('model = "mlp"\ntopology = "ring:4"\nsteps = 10\nclasses = ["a", "b"]\nshape = [1, 9, 9]\n')
    status, _, err = inside(monkeypatch, capsys, "check", str(file))
    assert (status, "have to agree on mean, std" in err) == (2, True)
    file.write_text(file.read_text() + "mean = [0.5]\nstd = [0.2]\n")
    status, out, _ = inside(monkeypatch, capsys, "check", str(file))
    assert status == 0
    assert "each owner has its own data" in out
    assert "steps of" in out


# ------------------------------------------------------------------------------------------------ bad input

FILES = {
    "empty.json": b"", "binary.toml": b"\xff\xfe\x00\x01" * 40, "binary.json": b"\xff\xfe\x00\x01", "list.json": b"[1]",
    "nan.json": b'{"lr": NaN}', "inf.toml": b"lr = inf", "deep.json": b"[" * 100_000, "bool.toml": b"epochs = true",
    "objects.json": b'{"objects": 3}', "table.toml": b"[lr]\na = 1", "null.json": b'{"data": null}',
    "empty.safetensors": b"", "empty.csv": b"", "empty.npz": b"", "no-text.csv": b"a,b\n1,2\n", "file": b"x",
    "images/a/x.png": b"not a picture", "cut/experiment.json": b'{"data": "dig', "no-run/notes.txt": b"",
    "lines/experiment.json": b"{}", "lines/summary.json": b'{"status": "finished", "last": 5}',
    "lines/metrics.jsonl": b'{"epoch": "x", "loss": "y"}\n\x00\n', "parts/experiment.json": b"{}",
    "parts/parts/0/part.json": b"{",
}

WORST = """
train empty.json | train binary.toml | train binary.json | train list.json | train nan.json | train inf.toml
train images.toml | train deep.json | train bool.toml | check objects.json | tune table.toml | train null.json
train --data csv:empty.csv | train --data csv:no-text.csv | train --data folder:images | train --data folder:empty.npz
train --data folder:nowhere | train --data csv:images | train --lr nan | train --lr -1 | train --alpha inf
train --seeds 99999999999 | train --epochs 1e3 | train --topology ring:1000000 | train --topology file:binary.json
train --partition by:colour | train --algorithm qg-dsgdm-n:mu=nan | train --memory-limit nan | train --milestones nan
train --runs file | train --runs file/x --epochs 1 | train --engine distributed --processes 99 | train --classes a b
train --on ray --engine distributed --processes 2 | tune --over lr= | tune --over lr=nan | tune --cap -1
tune --plot x.doc | runs file | runs nowhere | runs no-run | compare cut | compare nowhere | compare no-run | plot cut
plot nowhere | compare . | status nowhere | status lines | status parts | export nowhere | export cut | export lines
evaluate empty.safetensors | evaluate images | predict binary.toml - | report --runs nowhere | report --runs file
reproduce --list --runs nowhere | reproduce --list --runs file | reproduce figure-topology --out file
reproduce single-worker --json --log json | topology : | topology ring:99999999999999999999 | topology every:0/ring:4
topology ring:4 --plot images | data csv:binary.json | data folder: | partition digits --nodes -5
partition digits --nodes 100000 | partition digits --alpha nan | partition digits --alpha | partition digits --seed -1
algorithms : | algorithms slowmo:tau=0 | rendezvous --port -1 | completion tcsh | node bool.toml --node 0 --data x
node images.toml --node 0 --data x --rendezvous h:1 | demo --out file | -x
"""


@pytest.mark.filterwarnings("ignore")
def test_the_worst_input_is_refused_in_a_sentence_and_nothing_is_lost(monkeypatch, capsys, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "images.toml").mkdir()
    monkeypatch.chdir(tmp_path)
    for line in WORST.strip().replace("\n", "|").split("|"):
        status, out, err = inside(monkeypatch, capsys, *line.split())
        assert status == 2, (line, out, err)
        assert err, line
        assert "Traceback" not in err
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


@pytest.mark.filterwarnings("ignore")
def test_damaged_records_are_left_out(monkeypatch, capsys, tmp_path):
    (folder,) = leave_runs(tmp_path, 1)
    with open(f"{folder}/metrics.jsonl", "a") as file:
        file.write('{"epoch": "x", "loss": "y", "accuracy": "z"}\n')
    with open(f"{folder}/summary.json", "w") as file:
        file.write('{"status": "finished", "last": 5}')
    assert inside(monkeypatch, capsys, "runs", str(tmp_path))[0] == 0
    assert inside(monkeypatch, capsys, "compare", folder)[0] == 0
    assert inside(monkeypatch, capsys, "plot", folder, "--out", str(tmp_path / "curves.png"))[0] == 0


ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e"
"""Commands of a terminal: a colour, a title, an erased screen, and text from right to left."""


def test_names_in_files_do_not_command_the_terminal(monkeypatch, capsys, tmp_path):
    (tmp_path / "mailed.toml").write_text(f"model = {json.dumps(f'own:{ESCAPES}@12345678')}\n")
    status, _, err = inside(monkeypatch, capsys, "check", str(tmp_path / "mailed.toml"), "--topology", "ring:4")
    assert status == 2
    line = {"time": "2026-01-01T10:00:00Z", "event": "refused", "reason": ESCAPES}
    (tmp_path / "audit.jsonl").write_text(f"{json.dumps(line)}\n")
    status, shown, _ = inside(monkeypatch, capsys, "site", "audit", str(tmp_path))
    assert status == 0
    for text in (err, shown):
        assert "red" in text
        assert not {*ESCAPES} & {*text} & {"\x1b", "\x07", "\x9b", "\u202e"}
