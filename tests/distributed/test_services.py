"""The systemd unit and the container of a node: valid, confined, and enough for a node to train."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from commands import wait_for
from federations import Sites
from owners import EXPERIMENT, Owners, write_data

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "examples" / "services"
UNIT = SERVICES / "quasiglobal-node.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_the_unit_valid_and_confined(tmp_path):
    assert UNIT.read_text().count("/opt/quasiglobal/bin/qg node") == 1
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/quasiglobal/bin/qg node", f"{shutil.which('true')} node"))
    for words in (("verify", unit), ("security", "--offline=true", "--threshold=20", UNIT)):
        ran = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stderr == ""


def test_the_container_has_what_it_copies_and_runs_as_nobody_special():
    lines = (SERVICES / "Containerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)


def can_boot():
    return (
        sys.platform == "linux" and os.geteuid() == 0 and Path("/lib/systemd/systemd").exists()
        and "cgroup2" in Path("/proc/mounts").read_text()
    )


USER_ID = 45_987
"""User of the service in the test, whom nobody else on this machine is."""


@pytest.fixture
def cgroup():
    """A control group for systemd, removed with all those below it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    made = next(Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2") / f"qg-test-{os.getpid()}"
    made.mkdir()
    yield made

    def removed():
        for place in sorted([made, *(one for one in made.rglob("*") if one.is_dir())], reverse=True):
            with suppress(OSError):                         # its last process is on its way out
                place.rmdir()
        return not made.exists()

    wait_for(removed, 60)


@pytest.mark.slow
@pytest.mark.skipif(not can_boot(), reason="needs root, and systemd's own program")
def test_a_node_trains_under_the_units_restrictions_and_is_restarted_when_killed(tmp_path, cgroup):
    """Its neighbour is an ordinary process. Convolutions make machine code at run time, which the unit has to allow."""
    place = tmp_path / "service"
    place.mkdir()
    sites, owners = Sites(tmp_path, "complete:2", 2), Owners(tmp_path, 1)
    text = EXPERIMENT.replace("mlp", "cnn").replace("ring:4", "complete:2").format(epochs=300)
    for folder in (tmp_path, place):
        (folder / "experiment.toml").write_text(text)
    write_data(tmp_path)
    shutil.copytree(sites.folders[0].path, place / "site")
    images(tmp_path / "0.npz", place / "data")
    given = {
        "CGROUP": cgroup, "FOLDER": place, "UNIT": UNIT, "PACKAGES": sysconfig.get_path("purelib"),
        "PYTHON_PREFIX": sys.base_prefix, "SOURCE": ROOT / "src", "USER_ID": USER_ID,
    }
    with open(place / "boot.log", "w") as log:
        booted = subprocess.Popen(
            ["bash", Path(__file__).with_name("booted.sh")], stdout=log, stderr=log,
            env=os.environ | {name: str(value) for name, value in given.items()},
        )

    def node():
        return next((one for one in psutil.process_iter(["uids"]) if one.info["uids"].real == USER_ID), None)

    def said():
        return "".join(log.read_text() for log in (place / "boot.log", place / "node.log") if log.exists())

    try:
        other = owners.join(1, sites.folders[1], "--peer-timeout", "10")
        wait_for(lambda: '"message": "epoch 3"' in said() or booted.poll() is not None)
        assert booted.poll() is None, said()
        os.kill(node().pid, signal.SIGKILL)
        owners.said(other, 1)
        wait_for(lambda: "best model of node 0" in said())
        wait_for(lambda: node() is None)
        assert said().count("run folder: ") == 2            # started twice, and not again after its end
    finally:
        owners.close()
        booted.kill()
        booted.wait()


def images(source, folder):
    """An archive's examples as the folder that the unit names, with train and test archives."""
    from PIL import Image

    content = np.load(source)
    for split, suffix in (("train", ""), ("test", "_test")):
        for number, (x, y) in enumerate(zip(content[f"x{suffix}"], content[f"y{suffix}"], strict=True)):
            path = folder / split / str(y) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((255 * x[0]).astype(np.uint8)).save(path)
