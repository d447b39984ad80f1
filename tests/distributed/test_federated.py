"""`qg node --site`: training between sites, over mutual TLS and without a rendezvous."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from commands import wait_for
from federations import Sites

from quasiglobal.runs import checkpoints
from quasiglobal.runs.local import train
from quasiglobal.runs.options import Options
from quasiglobal.runs.parts import newest_of_parts
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import Experiment, from_toml

pytestmark = pytest.mark.slow

WORDS = ["--peer-timeout", "8", "--checkpoint-seconds", "0"]

IMPATIENT = (str(Path(__file__).parent / "impatient.py"),)


def same_as_the_simulator(folder, nodes=range(4)):
    """Assert that the sites have the models that the simulator gets from the data of all."""
    pooled = {"data": f"folder:{folder / 'all.npz'}", "partition": "by:owner"}
    (simulated,) = train(
        Experiment(**{**from_toml(folder / "experiment.toml").__dict__, **pooled}), Options(runs=folder / "runs")
    )
    rows, _ = checkpoints.newest(simulated.folder / "checkpoint")
    for k in nodes:
        (run,) = find_runs(folder / f"runs{k}")
        assert run.status == "finished"
        assert torch.allclose(newest_of_parts(run.folder)[0]["x"][0], rows["x"][k], rtol=0, atol=1e-12)


def audit(folder, number, event):
    (path,) = folder.glob(f"runs{number}/*/audit.jsonl")
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == event]


def trained(folder, number, epoch):
    return bool(list(folder.glob(f"runs{number}/*/parts/{number}/checkpoint/{epoch:06d}.json")))


def test_sites_get_what_the_simulator_gets_from_the_data_of_all(tmp_path, owners):
    four, sites = owners(epochs=3), Sites(tmp_path, "ring:4", 4)
    nodes = [four.join(k, sites.folders[k]) for k in range(4)]
    for k, process in enumerate(nodes):
        assert four.said(process, k) == ""
        printed = four.printed(k).read_text()
        assert f"node {k} (site{k}) of federation trial, file 2" in printed
        assert "neighbours over TLS 1.3: " in printed
        assert f"run folder: runs{k}/" in printed
        assert sorted(line["node"] for line in audit(tmp_path, k, "connected")) == sorted(((k - 1) % 4, (k + 1) % 4))
        for line in audit(tmp_path, k, "closed"):
            assert line["sent"] == line["received"] > 15 * 8 * 20_000       # 15 models of 26,122 numbers
    same_as_the_simulator(tmp_path)


def test_a_killed_site_and_a_stopped_site_come_back(tmp_path, owners):
    four, sites = owners(epochs=600), Sites(tmp_path, "ring:4", 4)
    nodes = [four.join(k, sites.folders[k], *WORDS) for k in range(4)]
    wait_for(lambda: trained(tmp_path, 2, 5))
    nodes[2].kill()
    nodes[2].wait()
    time.sleep(2)
    nodes[2] = four.join(2, sites.folders[2], *WORDS)
    wait_for(lambda: "process 1 reconnected to process 2" in four.log(1).read_text())
    os.kill(nodes[0].pid, signal.SIGSTOP)                   # it neither reads nor closes
    time.sleep(20)
    os.kill(nodes[0].pid, signal.SIGCONT)
    for k, process in enumerate(nodes):
        said = four.said(process, k)
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert run.records()[-1]["epoch"] == 600
        if k in (1, 3):
            assert f"process {k} reconnected to process 2" in said
            assert f"process {k} continues without process 0" in said
            assert f"process {k} reconnected to process 0" in said
    models = torch.cat([newest_of_parts(next(find_runs(tmp_path / f"runs{k}")).folder)[0]["x"] for k in range(4)])
    assert (models - models.mean(dim=0)).norm() < 0.05 * models.norm()


def test_certificates_that_end_are_renewed_without_losing_a_message(tmp_path, owners):
    four, sites = owners(epochs=600), Sites(tmp_path, "ring:4", 4)
    for site in sites.folders:
        site.renew(timedelta(seconds=20))
    nodes = [four.join(k, sites.folders[k], "--peer-timeout", "30", program=IMPATIENT) for k in range(4)]
    for k, process in enumerate(nodes):
        assert "continues without" not in four.said(process, k)
    renewed = [audit(tmp_path, k, "renewed") for k in range(4)]
    assert all(len({line["node"] for line in lines}) == 2 for lines in renewed), renewed
    same_as_the_simulator(tmp_path)


def test_a_revoked_site_is_cut_and_the_others_finish(tmp_path, owners):
    four, sites = owners(epochs=800), Sites(tmp_path, "ring:4", 4)
    nodes = [four.join(k, sites.folders[k], *WORDS, program=IMPATIENT) for k in range(4)]
    wait_for(lambda: all(trained(tmp_path, k, 3) for k in range(4)))
    sites.organiser.revoke("site2")
    sites.folders[0].accept(sites.text)                     # at a site that is no neighbour of the revoked one
    wait_for(lambda: all("revoked by federation file 3" in four.log(k).read_text() for k in (1, 3)), 60)
    for k in (0, 1, 3):
        said = four.said(nodes[k], k)
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert run.records()[-1]["epoch"] == 800
        assert "reconnected to process 2" not in said
    assert audit(tmp_path, 1, "revoked")[0]["node"] == 2


def test_another_experiment_is_named_at_both_sites_and_another_version_only_logged(tmp_path, owners, monkeypatch):
    four, sites = owners(epochs=3), Sites(tmp_path, "ring:4", 4)
    words = (tmp_path / "experiment.toml").read_text()
    nodes = [four.join(k, sites.folders[k], "--patience", "250") for k in range(2)]
    wait_for(lambda: list(tmp_path.glob("runs0/*/audit.jsonl")))
    wait_for(lambda: list(tmp_path.glob("runs1/*/audit.jsonl")))
    (tmp_path / "experiment.toml").write_text(words.replace("lr = 0.05", "lr = 0.06"))
    wrong = four.join(3, sites.folders[3], "--patience", "10")
    said = four.said(wrong, 3, status=2)
    assert said.count("its experiment is ") == 1            # once, however often it dials
    assert "its experiment is " in four.log(0).read_text()
    assert said.splitlines()[-1].startswith("qg: processes [0, 2] did not connect within 10 s")
    (tmp_path / "experiment.toml").write_text(words)
    monkeypatch.setenv("OTHER_VERSION", "9.9")
    nodes += [four.join(k, sites.folders[k], "--patience", "250", program=IMPATIENT) for k in (2, 3)]
    for k, process in enumerate(nodes):
        said = four.said(process, k)
        assert ("has quasiglobal 9.9" in said) == (k < 2)
    same_as_the_simulator(tmp_path)


def test_bad_commands_get_one_sentence(tmp_path, owners):
    four, sites = owners(epochs=1), Sites(tmp_path, "ring:4", 4)
    toml, key = tmp_path / "experiment.toml", sites.folders[3].key
    cases = [
        (("--node", "0"), "name the site's folder with --site, or --node and --rendezvous within one cluster"),
        (("--site", "nowhere"), "does not exist; run `qg site install`"),
        (("--site", str(sites.folders[0].path), "--node", "0"), "leave out --node and --rendezvous"),
    ]
    for words, match in cases:
        assert match in refusal(four, *words)
    key.chmod(0o644)
    assert "so others can use this key; run `chmod 600" in refusal(four, "--site", str(sites.folders[3].path))
    toml.write_text(toml.read_text() + 'algorithm = "slowmo"\n')
    assert "slowmo averages over all nodes: an exact mean" in refusal(four, "--site", str(sites.folders[0].path))


def refusal(four, *words):
    """Start a node with these words; return its one sentence."""
    four.log(0).unlink(missing_ok=True)
    said = four.said(four.launch(0, *words), 0, status=2)
    assert len(said.splitlines()) == 1, said
    return said
