"""Back up, restore and move a site, by the commands of docs/deploy.md, while it trains with another one."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PATIENCE, wait_for
from federations import free_ports
from owners import EXPERIMENT, write_data

from quasiglobal.peers.audit import Trail
from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.runs.store import find_runs

IMPATIENT = str(Path(__file__).parent / "impatient.py")


class Machine:
    """A machine with the data of one site: it runs commands of the page, and the node."""

    def __init__(self, folder, number):
        self.folder, self.number, self.node = folder, number, None
        folder.mkdir()
        shutil.copy(folder.parent / f"{number}.npz", folder / "data.npz")
        (folder / "experiment.toml").write_text(EXPERIMENT.format(epochs=400).replace("ring:4", "complete:2"))
        shim = folder / "bin" / "qg"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m quasiglobal "$@"\n')
        shim.chmod(0o755)
        self.around = os.environ | {
            "PATH": f"{shim.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PAUSE": "0.1",
        }

    @property
    def site(self):
        return SiteFolder(self.folder / "site")

    def does(self, command, codes=(0,)):
        """Run a command line of the page; return what it said."""
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, env=self.around, capture_output=True, text=True)
        assert done.returncode in codes, done.stderr
        return done.stdout + done.stderr

    def start(self, *words):
        """Start the node, always by the same command."""
        command = [sys.executable, IMPATIENT, "node", "experiment.toml", "--site", "site", "--data", "data.npz"]
        command += ["--peer-timeout", "8", "--checkpoint-seconds", "0", *words]
        with open(self.folder / "log", "w") as said:
            self.node = subprocess.Popen(command, cwd=self.folder, env=self.around, stdout=said, stderr=said)

    def ended(self, status=0):
        assert self.node.wait(timeout=PATIENCE) == status, self.log()
        return self.log()

    def log(self):
        return (self.folder / "log").read_text()

    @property
    def epochs(self):
        """The newest epoch with a checkpoint."""
        return max((int(path.stem) for path in self.folder.glob("runs/*/parts/*/checkpoint/??????.json")), default=0)


@pytest.fixture
def machines(tmp_path):
    write_data(tmp_path)
    made = []

    def make(name, number):
        made.append(Machine(tmp_path / name, number))
        return made[-1]

    yield make
    for machine in made:
        if machine.node is not None:
            machine.node.kill()
            machine.node.wait()


def commands():
    """The command lines of the page, by the step that they are in."""
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    _, section = page.split("## Back up, restore and move a site\n")
    section = section.partition("\n## ")[0]
    back_up, restore, move = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return back_up.splitlines(), restore.splitlines(), [line.partition("  #")[0].strip() for line in move.splitlines()]


@pytest.mark.slow
def test_a_site_is_backed_up_restored_and_moved_while_the_other_one_trains(tmp_path, machines):
    (back_up,), (extract, install, show), (request, approve, _) = commands()
    organiser, ports = OrganiserFolder(tmp_path / "federation"), free_ports(3)
    organiser.new("tumours", "complete:2", 30)
    basel, aachen = machines("basel", 0), machines("aachen", 1)
    asked = [
        machine.site.request("tumours", name, f"127.0.0.1:{port}")[1]
        for machine, name, port in ((basel, "basel", ports[0]), (aachen, "aachen", ports[1]))
    ]
    organiser.approve(asked, 2, [(0, 1)])
    for machine in (basel, aachen):
        machine.site.pin(organiser.file.read_bytes(), "the file")
        machine.site.accept(organiser.file.read_bytes())
        machine.start()

    # back up while the node trains, and lose the machine
    wait_for(lambda: aachen.epochs >= 10)
    aachen.does(back_up, codes=(0, 1))
    saved = aachen.epochs
    aachen.node.kill()
    aachen.node.wait()
    archive = aachen.folder / "site-backup.tar.gz"
    assert archive.stat().st_mode & 0o777 == 0o600

    # restore on other machines, with the newest file
    organiser.extend(60)
    other, copy = machines("other", 1), machines("copy", 1)
    for machine in (other, copy):
        shutil.copy(archive, machine.folder)
        machine.does(extract)
        assert machine.site.federation().serial == 2
        shutil.copy(organiser.file, machine.folder)
        assert "Installed federation tumours, serial 3" in machine.does(install)
        assert "This site is node 1" in machine.does(show)
        secrets = (machine.site.key, machine.site.certificate, machine.site.data)
        assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert other.epochs <= saved + 1
    other.start()
    wait_for(lambda: other.epochs > saved + 5)
    wait_for(lambda: basel.site.federation().serial == 3)   # the restored site passes it on

    # never two copies at once
    copy.start("--patience", "8")
    assert "is taken: another process with its certificate is connected" in copy.ended(2)

    # move it to another address
    other.node.send_signal(signal.SIGINT)
    other.ended(130)
    other.does(back_up)
    moved = machines("moved", 1)
    shutil.move(other.folder / "site-backup.tar.gz", moved.folder)
    for name in ("site", "runs"):
        shutil.rmtree(other.folder / name)
    moved.does(extract)
    moved.does(request.replace("new.aachen.example:7443", f"127.0.0.1:{ports[2]}"))
    shutil.copy(moved.folder / "site/request-aachen.json", tmp_path)
    moved.does(f"cd {tmp_path} && {approve} --yes")
    for machine in (moved, basel):
        shutil.copy(organiser.file, machine.folder)
        machine.does(install)
    assert (moved.site.own().node, moved.site.own().address) == (1, f"127.0.0.1:{ports[2]}")
    moved.start()
    for machine in (basel, moved):
        machine.ended()
        (run,) = find_runs(machine.folder / "runs")
        assert run.status == "finished"
        trail = Trail.read(run.folder / "audit.jsonl")
        assert trail.breaks == {}
    starts = [line for line in trail.lines if line["event"] == "started"]
    assert len(starts) == 3                                 # those of aachen, of the restored and of the moved site
