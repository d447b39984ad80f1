"""`qg node --site`: training between sites, over mutual TLS and without a rendezvous."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import wait_for
from federations import Sites

from quasiglobal.peers.edge import HEADER
from quasiglobal.runs import checkpoints
from quasiglobal.runs.building import data_of
from quasiglobal.runs.checkpoints import newest_of_parts
from quasiglobal.runs.export import export
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import from_toml
from quasiglobal.training.rows import models_of

pytestmark = pytest.mark.slow

WORDS = ["--peer-timeout", "8", "--checkpoint-seconds", "0"]

IMPATIENT = (str(Path(__file__).parent / "impatient.py"),)


def same_as_the_simulator(folder, nodes=range(4), **how):
    """Assert that the sites have the models that the simulator gets from the data of all."""
    pooled = {"data": f"folder:{folder / 'all.npz'}", "partition": "by:owner", **how}
    (simulated,) = simulate(
        replace(from_toml(folder / "experiment.toml"), **pooled), Options(runs=folder / "runs")
    )
    rows = checkpoints.newest(simulated.folder / "checkpoint").rows
    for k in nodes:
        (run,) = find_runs(folder / f"runs{k}")
        assert run.status == "finished"
        assert torch.allclose(newest_of_parts(run.folder)[0].rows["x"][0], rows["x"][k], rtol=0, atol=1e-12)


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
            assert line["received"] > 15 * 8 * 20_000       # 15 models of 26,122 numbers
            assert abs(line["sent"] - line["received"]) in (0, 8 * HEADER)  # its last word, if the other has gone
    same_as_the_simulator(tmp_path)


def test_sites_that_agree_on_their_numbers_of_examples_count_by_them(tmp_path, owners):
    four, sites = owners(epochs=3), Sites(tmp_path, "ring:4", 4)
    sizes = [len(np.load(tmp_path / f"{k}.npz")["y"]) for k in range(4)]
    weights = ",".join(map(str, sizes))
    assert len(set(sizes)) > 1
    nodes = [four.join(k, sites.folders[k], "--weights", weights) for k in range(4)]
    for k, process in enumerate(nodes):
        assert four.said(process, k) == ""
    same_as_the_simulator(tmp_path, weights="examples")


def test_a_killed_site_and_a_stopped_site_come_back(tmp_path, owners):
    four, sites = owners(epochs=600), Sites(tmp_path, "ring:4", 4)
    nodes = [four.join(k, sites.folders[k], *WORDS) for k in range(4)]
    wait_for(lambda: trained(tmp_path, 2, 5))
    nodes[2].kill()
    nodes[2].wait()
    time.sleep(2)
    nodes[2] = four.join(2, sites.folders[2], *WORDS)
    wait_for(lambda: "node 1 (site1) reconnected to node 2 (site2)" in four.log(1).read_text())
    os.kill(nodes[0].pid, signal.SIGSTOP)                   # it neither reads nor closes
    time.sleep(20)
    os.kill(nodes[0].pid, signal.SIGCONT)
    for k, process in enumerate(nodes):
        said = four.said(process, k)
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert run.records()[-1]["epoch"] == 600
        if k in (1, 3):
            assert f"node {k} (site{k}) reconnected to node 2 (site2)" in said
            assert f"node {k} (site{k}) continues without node 0 (site0)" in said
            assert f"node {k} (site{k}) reconnected to node 0 (site0)" in said
    runs = [next(find_runs(tmp_path / f"runs{k}")) for k in range(4)]
    models = torch.cat([newest_of_parts(run.folder)[0].rows["x"] for run in runs])
    assert (models - models.mean(dim=0)).norm() < 0.05 * models.norm()


def test_a_site_that_missed_the_end_fetches_the_result_at_once_or_later(tmp_path, owners):
    four, sites = owners(epochs=30), Sites(tmp_path, "ring:4", 4)
    toml = tmp_path / "experiment.toml"
    toml.write_text(toml.read_text().replace('"mlp"', '"cnn"').replace("eval_every = 50", "eval_every = 1"))

    def model(number):
        (run,) = find_runs(tmp_path / f"runs{number}")
        return models_of(newest_of_parts(run.folder)[0].rows)

    def took(number):
        """Assert that site 3 has the whole model of this one, with the statistics of its layers."""
        (run,) = find_runs(tmp_path / "runs3")
        assert (run.status, run.records()[-1]["epoch"]) == ("finished", 30)
        assert (run.summary.fetched["node"], run.summary.fetched["step"]) == (number, 150)
        theirs, mine = model(number), model(3)
        assert theirs.keys() == mine.keys() > {"x"}
        assert all(mine[name].equal(theirs[name]) for name in mine)
        outputs = export(run, "3").outputs(data_of(run.experiment, None, f"folder:{tmp_path / '3.npz'}"))
        right = outputs.argmax(dim=1) == data_of(run.experiment, None, f"folder:{tmp_path / '3.npz'}").test.y
        assert float(right.double().mean()) == pytest.approx(run.summary.last["accuracy"])
        return run.summary

    nodes = [four.join(k, sites.folders[k], *WORDS) for k in range(4)]
    wait_for(lambda: trained(tmp_path, 3, 3))
    nodes[3].kill()
    nodes[3].wait()
    four.said(nodes[1], 1)                                  # nobody is missing there
    wait_for(lambda: all("may fetch its model from here for 600 s" in four.printed(k).read_text() for k in (0, 2)))
    said = four.said(four.join(3, sites.folders[3], *WORDS), 3)
    assert "the run has ended; here is its model, from node" in said
    for k in (0, 2):                                        # they do not wait any longer
        assert f"node {k} (site{k}) gave its model to node 3 (site3), which missed the end" in four.said(nodes[k], k)
        assert [line["step"] for line in audit(tmp_path, k, "gave result")] == [150]
    summary = took(audit(tmp_path, 3, "fetched result")[0]["node"])
    assert summary.fetched["own_epochs"] >= 3
    (run,) = find_runs(tmp_path / "runs3")
    assert summary.kept[0]["value"] == max(record["accuracy"] for record in run.records())

    shutil.rmtree(tmp_path / "runs3")                       # hours later, with nothing; one neighbour starts again
    again = four.join(0, sites.folders[0], *WORDS, "--linger", "100")
    four.said(four.join(3, sites.folders[3], "--peer-timeout", "3"), 3)
    assert took(0).fetched["own_epochs"] == 0
    again.send_signal(signal.SIGINT)                        # the other neighbour of site 0 does not come
    four.said(again, 0)


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
        assert "reconnected to node 2" not in said
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
    assert said.count("is not connected: its experiment is ") == 1      # once, however often it dials
    assert "its experiment is " in four.log(0).read_text()
    last = said.splitlines()[-1]
    assert last.startswith("qg: no connection within 10 s to node 0 (site0): ")
    assert "its experiment is " in last
    (tmp_path / "experiment.toml").write_text(words)
    monkeypatch.setenv("OTHER_VERSION", "9.9")
    nodes += [four.join(k, sites.folders[k], "--patience", "250", program=IMPATIENT) for k in (2, 3)]
    for k, process in enumerate(nodes):
        said = four.said(process, k)
        assert ("has quasiglobal 9.9" in said) == (k < 2)
    same_as_the_simulator(tmp_path)


def test_a_clock_that_is_two_hours_slow_is_named_at_both_sites(tmp_path, owners, monkeypatch):
    four, sites = owners(epochs=3), Sites(tmp_path, "ring:4", 4)
    four.join(1, sites.folders[1], "--patience", "250", program=IMPATIENT)
    monkeypatch.setenv("SLOW_CLOCK", "7200")
    four.join(0, sites.folders[0], "--patience", "250", program=IMPATIENT)
    begins = r"the certificate of node 1 \(site1\) begins at \S+ (\S+) UTC"
    slow = rf"{begins}, and it is \S+ (\S+) UTC by the clock of node 0 \(site0\); compare `date -u` at both"
    both = rf"node 0 \(site0\) is not connected: it refused this node: {slow}; it is \S+ (\S+) UTC by the clock of this"
    wait_for(lambda: re.search(slow, four.log(0).read_text()) and re.search(both, four.log(1).read_text()))
    times = re.search(both, four.log(1).read_text()).groups()
    _, behind, right = (60 * int(time[:2]) + int(time[3:]) for time in times)
    assert abs((right - behind) % 1440 - 120) <= 5


def test_a_second_process_of_a_site_is_told_that_the_site_is_taken(tmp_path, owners):
    four, sites = owners(epochs=400), Sites(tmp_path, "ring:4", 4)
    nodes = [four.join(k, sites.folders[k], *WORDS) for k in range(4)]
    wait_for(lambda: all(trained(tmp_path, k, 2) for k in range(4)))
    elsewhere = ["--runs", "elsewhere", "--patience", "8"]
    listens = refusal(four, "--site", str(sites.folders[0].path), *elsewhere)
    assert re.search(r"cannot listen at 127.0.0.1:\d+: Address already in use; this node may run already", listens)
    four.log(3).unlink()
    dials = four.said(four.join(3, sites.folders[3], *elsewhere), 3, status=2)
    taken = "it refused this node: node 3 (site3) is taken: another process with its certificate is connected"
    assert dials.count(f"node 0 (site0) is not connected: {taken}") == 1
    assert dials.endswith(f"\nqg: no connection within 8 s to node 0 (site0): {taken}; to node 2 (site2): {taken}\n")
    for k, process in enumerate(nodes):
        four.said(process, k)
        told = [line for line in audit(tmp_path, k, "refused") if line["reason"].startswith("node 3 (site3) is taken")]
        assert bool(told) == (k in (0, 2))
    timed = [line for line in four.printed(1).read_text().splitlines() if "examples/s" in line or "TLS 1.3" in line]
    assert len(timed) == 9                                  # the opening line, and a test every 50 epochs
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ \S", line) for line in timed)


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
