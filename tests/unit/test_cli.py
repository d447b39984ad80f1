"""The command line: output, exit status and error messages."""

import json
import logging
import subprocess
import sys

import pytest
from terminal import inside

from quasiglobal.cli.terminal import watcher
from quasiglobal.runs.store import RunFolder, find_runs
from quasiglobal.training.experiment import Experiment


def qg(*words):
    command = [sys.executable, "-m", "quasiglobal", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


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
    ("topology", "ring:-5"): "qg: ring needs n >= 3, got -5; use ring(3)",
    ("partition", "digits", "--nodes", "0"): "qg: the number of nodes must be >= 1, got 0",
    ("rendezvous", "--port", "80000000"): "qg: port must be at most 65535, got 80000000",
    ("runs", "no-such-folder"): "qg: there is no folder no-such-folder",
    ("train", "--runs", __file__): f"qg: {__file__} is a file; name a folder for the runs",
    ("train", "--engine", "distributed"): "qg: this process was not started as one of several (RANK, WORLD_SIZE,",
    ("train", "--stream"): "qg: digits cannot be streamed; leave out --stream",
    ("trian",): "qg: unknown command 'trian'; did you mean 'train'?",
    ("train", "--pretrained", "false"):
        "qg: false is not a .toml file; switches accept no value: write --no-pretrained",
    ("topology", "ring:2"): "qg: ring needs n >= 3, got 2; use complete(2)",
    ("topology", "ring:4", "--plot", "graph.doc"): "qg: cannot draw into graph.doc; end its name with .png",
    ("topology", "ring:4", "--plot", "/proc/graph.png"): "qg: cannot write /proc/graph.png",
    ("topology", "file:no-such-file"): "qg: cannot read the edge list no-such-file",
    ("algorithms", "qg-dsgd"): "qg: unknown algorithm 'qg-dsgd'; did you mean 'qg-dsgdm'?",
    ("reproduce", "figure-3d"): "qg: unknown target 'figure-3d'; did you mean 'figure-2d'?",
    ("algorithms", "quasiglobal.algorithms.base:Algorithm", "--check"): "qg: Algorithm failed",
    ("topology", "ring:4", "--parameters", "-5"): "qg: parameters must be >= 1, got -5",
    ("topology", "ring:4", "--plot", "graph.pgf"): "qg: cannot draw into graph.pgf",
    ("topology", "ring:4", "--plot", "/dev/null/graph.png"): "qg: cannot write /dev/null/graph.png",
    ("reproduce", "figure-topology", "--out", "/dev/null"): "qg: cannot write /dev/null/figure-topology.png",
    ("algorithms", "no_such_module:Name"): "qg: cannot import no_such_module",
    ("tune", "--engine", "distributed", "--processes", "2"): "qg: qg tune trains on the simulator; leave out --engine",
    ("train", "--model", "os:path"): "qg: os:path is neither an nn.Module nor a function that returns one",
    ("train", "--batch", "100000000000"): "qg: 16 models cnn with batch 100000000000 do not fit the memory; use",
    ("train", "--warmup", "1e308"): "qg: warmup must be at most 1,000,000,000, got 1e+308",
    ("train", "--seed", "99999999999999999999"): "qg: seed must be at most",
    ("train", "--width", "nan"): "qg: width must be > 0 and finite, got nan",
    ("train", "--peer-timeout", "-1"): "qg: peer_timeout must be > 0 seconds, got -1",
    ("train", "--engine", "distributed", "--processes", "0"): "qg: processes must be >= 1, got 0",
    ("rendezvous", "--port", "99999"): "qg: port must be at most 65535, got 99999",
    ("compare", "/nowhere"): "qg: /nowhere is not a run",
    ("evaluate", "/nowhere"): "qg: cannot read a model from /nowhere",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_is_one_sentence_and_status_2(monkeypatch, capsys, words):
    status, out, err = inside(monkeypatch, capsys, *words)
    assert status == 2
    assert err.startswith(BAD[words])
    assert "Traceback" not in out + err


@pytest.mark.parametrize(("words", "says"), [
    ((), "learning rate 0.2, warm-up from 0.1 over 5 epochs (longer than the run), × 0.1 at 0.5, 0.75 of the run"),
    (("--warmup", "0.5"), "learning rate 0.2, warm-up from 0.1 over 0.5 epochs, × 0.1 at 0.5, 0.75 of the run"),
    (("--lr", "0.05", "--milestones", "0.9"), "learning rate 0.05, × 0.1 at 0.9 of the run"),
    (("--lr", "0.5", "--warmup", "0", "--milestones"), "learning rate 0.5, constant"),
])
def test_training_prints_its_schedule(monkeypatch, capsys, tmp_path, words, says):
    short = ("--model", "mlp", "--topology", "ring:4", "--epochs", "1", "--steps", "1", "--runs", str(tmp_path))
    status, out, _ = inside(monkeypatch, capsys, "train", *short, *words)
    assert status == 0
    assert says in " ".join(out.split())


QUICK = ("--model", "mlp", "--topology", "ring:4", "--epochs", "3", "--steps", "1", "--device", "cpu")


def test_a_file_takes_every_option_and_an_experiment_json(monkeypatch, capsys, tmp_path):
    runs = tmp_path / "runs"
    (tmp_path / "e.toml").write_text(f'model = "mlp"\ntopology = "ring:4"\nepochs = 1\nseeds = 2\nruns = "{runs}"\n')
    assert inside(monkeypatch, capsys, "train", str(tmp_path / "e.toml"))[0] == 0
    assert len(list(runs.iterdir())) == 2
    stored = next(runs.glob("*-s1-*")) / "experiment.json"
    status, out, _ = inside(monkeypatch, capsys, "train", str(stored), "--runs", str(runs))
    assert status == 0
    assert "is already finished" in " ".join(out.split())
    (tmp_path / "e.toml").write_text("seedss = 2\n")
    status, _, error = inside(monkeypatch, capsys, "train", str(tmp_path / "e.toml"))
    assert (status, "did you mean 'seeds'?" in error) == (2, True)
    (tmp_path / "e.toml").write_text('seeds = "two"\n')
    status, _, error = inside(monkeypatch, capsys, "train", str(tmp_path / "e.toml"))
    assert status == 2
    assert "seeds in" in error


def test_a_diverged_run_exits_with_3(monkeypatch, capsys, tmp_path):
    assert inside(monkeypatch, capsys, "train", *QUICK, "--lr", "1e30", "--runs", str(tmp_path))[0] == 3


@pytest.mark.slow
def test_a_json_log_is_alone_on_standard_output(tmp_path):
    done = qg("train", *QUICK, "--log", "json", "--runs", str(tmp_path))
    assert [json.loads(line)["epoch"] for line in done.stdout.splitlines()] == [1, 2, 3]
    assert "finished" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--log", "json")])
def test_a_closed_pipe_does_not_stop_a_training(tmp_path, words):
    command = [sys.executable, "-m", "quasiglobal", "train", *QUICK, *words, "--runs", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert "Error" not in said
    (run,) = find_runs(tmp_path)
    assert run.status == "finished"


def test_no_stack_trace_from_a_real_process(tmp_path):
    (tmp_path / "two").write_text("0 1\n2 3\n")
    done = qg("topology", f"file:{tmp_path}/two")
    assert done.returncode == 2
    assert done.stderr == (
        f"qg: file:{tmp_path}/two is not connected: it falls into 2 parts that cannot all reach each "
        "other; add an edge\n"
    )
    done = qg("topologi")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def leave_seeds(root, *accuracies):
    """Write and yield one run per seed; accuracy None means it diverged before its first evaluation."""
    for seed, accuracy in enumerate(accuracies):
        run = RunFolder.of(Experiment(epochs=1, seed=seed), root)
        run.describe()
        test = {} if accuracy is None else {"accuracy": accuracy, "accuracy_worst": accuracy}
        run.rewrite([{"epoch": 1, "loss": 1.0 if test else None, "images_per_second": 9.0} | test])
        run.finish("finished" if test else "diverged", {})
        yield run


def test_a_seed_that_diverged_is_a_star_and_not_left_out_of_the_mean(monkeypatch, capsys, tmp_path):
    folders = [str(run.folder) for run in leave_seeds(tmp_path, 0.75, 0.8, None)]
    status, out, _ = inside(monkeypatch, capsys, "compare", *folders, "--markdown")
    assert status == 0
    *_, row = out.strip().splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["3", "⋆", "⋆", "⋆", "⋆", "diverged, finished"]
    status, out, _ = inside(monkeypatch, capsys, "compare", *folders[:2], "--markdown")
    assert "| 77.50 ± 3.54 |" in out


def test_a_run_that_diverged_at_once_is_plotted(monkeypatch, capsys, tmp_path):
    folders = [str(run.folder) for run in leave_seeds(tmp_path / "runs", None)]
    status, _, _ = inside(monkeypatch, capsys, "plot", *folders, "--out", str(tmp_path / "curves.png"))
    assert status == 0
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize(("accuracies", "said"), [
    ((None,), []),
    ((None, 0.5), ["epoch 1: loss 1.000  accuracy 50.0%, 9 examples/s"]),
    ((0.5, None), ["epoch 1: loss 1.000  accuracy 50.0%, 9 examples/s"]),
])  # fmt: skip
def test_a_trial_that_diverged_on_another_machine_does_not_stop_the_watching(tmp_path, capsys, accuracies, said):
    runs = list(leave_seeds(tmp_path, *accuracies))
    with watcher("plain") as watch:
        watch(runs, [run.read_records()[-1] for run in runs])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")] == said


def test_log_lines_are_printed_while_runs_are_watched(capsys):
    logger = logging.getLogger("quasiglobal")
    with watcher("plain"):
        logger.info("compiling a network")
        logger.debug("a detail")
        logger.warning("a slow network")
    logger.info("nobody watches")
    shown = capsys.readouterr()
    assert shown.out.split("\n", 1)[0] == "compiling a network"
    assert "detail" not in shown.out
    assert "nobody" not in shown.out
    assert "a slow network" in shown.err


def test_brackets_in_a_name_are_not_markup(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "a[" / "b]"
    status, out, _ = inside(monkeypatch, capsys, "reproduce", "figure-topology", "--out", str(folder))
    assert status == 0
    assert "a[" in out
    assert (folder / "figure-topology.csv").exists()


@pytest.mark.slow
def test_a_closed_pipe_and_a_full_disk_end_quietly():
    command = f"{sys.executable} -m quasiglobal algorithms --markdown"
    piped = subprocess.run(f"{command} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("| algorithm")
    assert piped.stderr == ""
    full = subprocess.run(f"{command} > /dev/full", shell=True, capture_output=True, text=True, check=False)
    assert full.returncode == 2
    assert full.stderr == "qg: No space left on device\n"


@pytest.mark.slow
def test_your_own_algorithm_is_found_from_where_you_are(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import quasiglobal as qg\nclass Mine(qg.Algorithm):\n    pass\n"
        "    def step(self, x, g, state, node):\n        return node.mix(x - node.lr * g), state\n"
    )
    script = f"import os; os.chdir({str(tmp_path)!r}); from quasiglobal.cli import main; main()"
    command = [sys.executable, "-c", script, "algorithms", "mine:Mine", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine:Mine passed 12 checks" in done.stdout


def test_version(monkeypatch, capsys):
    assert inside(monkeypatch, capsys, "--version")[1] == "qg 0.1.0\n"


def test_algorithms_lists_and_explains(monkeypatch, capsys):
    _, table, _ = inside(monkeypatch, capsys, "algorithms", "--markdown")
    assert "| `qg-dsgdm-n` | 1 | 1 | doubly stochastic | Lin et al. 2021 | tolerated |" in table
    _, plain, _ = inside(monkeypatch, capsys, "algorithms")
    assert "qg-dsgdm-n" in plain
    _, text, _ = inside(monkeypatch, capsys, "algorithms", "slowmo:tau=6")
    assert "Wang et al. 2020" in text
    assert "1 + 1/6 to all" in text
    assert "x_i ← Σ_j w_ij (x_j − η m_j)" in text, "prints the base's equation too"
    status, text, _ = inside(monkeypatch, capsys, "algorithms", "qg-dsgdm", "--check")
    assert status == 0
    assert "passed 12 checks" in text


def test_reproduce_makes_a_figure_without_training(monkeypatch, capsys, tmp_path):
    status, out, _ = inside(monkeypatch, capsys, "reproduce", "figure-topology", "--out", str(tmp_path))
    assert status == 0
    assert "89 edges" in " ".join(out.split())
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".csv"}
