"""Four hospitals with their own notes, as described in docs/text.md."""

import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from owners import Owners

from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs import checkpoints
from quasiglobal.runs.checkpoints import newest_of_parts
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import from_toml

pytest.importorskip("transformers", reason="needs the extra nlp")

ROOT = Path(__file__).parents[2]


class Hospitals(Owners):
    """Owners of the data that examples/notes.py writes, with the experiment of docs/text.md in float64."""

    data = "hospital-{number}"

    def __init__(self, folder):
        self.folder, self.started = folder, []
        subprocess.run([sys.executable, ROOT / "examples" / "notes.py", folder], check=True, stdout=subprocess.DEVNULL)
        (told,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "text.md").read_text(), flags=re.DOTALL)
        (folder / "experiment.toml").write_text(textwrap.dedent("   " + told.lstrip()) + 'precision = "fp64"\n')


@pytest.mark.slow
def test_hospitals_learn_together_what_the_simulator_learns_from_the_notes_of_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    four, server = Hospitals(tmp_path), serve("127.0.0.1", 0)
    try:
        nodes = [four.start(k, f"127.0.0.1:{server.port}") for k in range(4)]
        for k, process in enumerate(nodes):
            four.said(process, k)
    finally:
        four.close()

    pooled = {"data": "csv:notes", "partition": "by:hospital"}
    whole = replace(from_toml(tmp_path / "experiment.toml"), **pooled)
    (simulated,) = simulate(whole, Options(runs=tmp_path / "runs", device="cpu"))
    together = checkpoints.newest(simulated.folder / "checkpoint").rows["x"]
    for k in range(4):
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert torch.allclose(newest_of_parts(run.folder)[0].rows["x"][0], together[k], rtol=0, atol=1e-10)
        assert run.summary.last["accuracy"] > 0.95
