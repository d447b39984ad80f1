"""The files of a site that are its owner's alone, their backups, and the fingerprints of its data."""

import logging
import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from test_federation import enrolled

from quasiglobal.common.files import make_private
from quasiglobal.data.dataset import Dataset, Examples, keyed_fingerprint
from quasiglobal.data.own import from_arrays
from quasiglobal.data.sources import load
from quasiglobal.errors import InputError
from quasiglobal.peers.certificates import now
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.runs import node
from quasiglobal.runs.checkpoints import Part
from quasiglobal.runs.node import InFederation, facts_of_data

KEY = b"k" * 32


def mode(path):
    return path.stat().st_mode & 0o777


def test_a_folder_and_its_content_become_their_owners_alone(tmp_path):
    folder = tmp_path / "run"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts/file").write_text("a")
    (tmp_path / "elsewhere").write_text("a")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    for path in (folder, folder / "parts"):
        path.chmod(0o755)
    for path in (folder / "parts/file", tmp_path / "elsewhere"):
        path.chmod(0o644)
    assert make_private(folder) == 0o755
    assert [mode(path) for path in (folder, folder / "parts", folder / "parts/file")] == [0o700, 0o700, 0o600]
    assert mode(tmp_path / "elsewhere") == 0o644
    assert make_private(folder) == 0
    folder.chmod(0o755)
    (tmp_path / "elsewhere on a disk").symlink_to(folder)
    assert make_private(tmp_path / "elsewhere on a disk") == 0o755
    assert mode(folder) == 0o700
    assert make_private(tmp_path / "missing") == 0


def test_a_mode_that_cannot_be_changed_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o750)
    monkeypatch.setattr(type(tmp_path), "chmod", lambda *words: None)       # as on a disk without permissions
    with pytest.raises(InputError, match="has mode 750, so others can use it, and it cannot be changed; run `chmod -R"):
        make_private(tmp_path)


def test_what_a_site_writes_is_its_owners_alone(tmp_path, caplog):
    run, before = tmp_path / "run", os.umask(0o022)
    run.mkdir()
    try:
        node.keep_private(run)
        (run / "file").write_text("a")
    finally:
        os.umask(before)
    assert (mode(run), mode(run / "file")) == (0o700, 0o600)
    assert f"{run} had mode 755, so others could read this site's models; it has mode 700 now" in caplog.text


@pytest.fixture(scope="module")
def data():
    x = torch.arange(60 * 4, dtype=torch.float32).view(60, 4)
    return from_arrays(x, torch.arange(60) % 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: replace(data, train=data.train.at(np.arange(47))),
        lambda data: replace(data, train=data.train.at(np.arange(48)[::-1].copy())),
        lambda data: replace(data, train=replace(data.train, y=(data.train.y + 1) % 3)),
        lambda data: replace(data, test=replace(data.test, x=data.test.x + 1e-3)),
        lambda data: replace(data, test=replace(data.test, x=data.test.x.view(-1, 2, 2)),
                             train=replace(data.train, x=data.train.x.view(-1, 2, 2))),
        lambda data: replace(data, classes=("a", "b", "c")),
    ],
)
def test_a_fingerprint_covers_all_examples_targets_shapes_and_classes(data, change):
    assert keyed_fingerprint(data, KEY) == keyed_fingerprint(replace(data, name="other"), KEY)
    assert keyed_fingerprint(change(data), KEY) != keyed_fingerprint(data, KEY)
    assert keyed_fingerprint(data, b"j" * 32) != keyed_fingerprint(data, KEY)


def test_a_fingerprint_does_not_depend_on_memory(data, monkeypatch):
    other = replace(data, train=replace(data.train, x=data.train.x.t().contiguous().t()))
    assert not other.train.x.is_contiguous()
    monkeypatch.setattr("quasiglobal.data.dataset.PIECE", 32)
    assert keyed_fingerprint(other, KEY) == keyed_fingerprint(data, KEY)


def test_a_fingerprint_of_data_on_disk_reads_their_checksums_alone(data):
    class Stored:
        def __init__(self, checksums, has_targets):
            self.checksums, self.has_targets = np.array(checksums, dtype="<u4"), has_targets

    unread = torch.zeros(2, 4).expand(2, 4)

    def marked(checksums, y, has_targets=False):
        split = Examples(unread, torch.tensor(y), shards=Stored(checksums, has_targets))
        return keyed_fingerprint(Dataset("a", split, split, ("0", "1")), KEY)

    assert len({marked([1, 2], [0, 1]), marked([1, 3], [0, 1]), marked([1, 2], [1, 1])}) == 3
    assert marked([1, 2], [0, 1], True) == marked([1, 2], [1, 1], True)     # the checksums cover these targets


@pytest.fixture
def site(tmp_path):
    return enrolled(tmp_path)[1][0]


def test_the_key_of_the_fingerprints_comes_from_the_sites_key_and_stays_if_that_is_moved(site):
    key = site.data_key()                                   # of a folder of version 2
    assert len(key) == 32
    assert key not in site.key.read_bytes()
    site.renew()
    assert (site.data_key(), mode(site.data)) == (key, 0o600)
    elsewhere = site.path.parent / "site.key"
    site.key.rename(elsewhere)
    assert site.data_key() == key
    site.data.unlink()
    assert site.data_key() is None
    site.renew(key=elsewhere)
    assert site.data_key() == key
    site.data.chmod(0o644)
    with pytest.raises(InputError, match="so others can use this key; run `chmod 600"):
        site.data_key()
    site.data.chmod(0o600)
    site.data.write_text("x")
    with pytest.raises(InputError, match=r"data.key is damaged; delete it, and run `qg site renew`"):
        site.data_key()


def test_changed_data_are_said_and_recorded_and_a_resumed_run_keeps_the_history(site, tmp_path, data, caplog):
    part, place = Part(tmp_path, 0, [0]), InFederation(site.path)
    digits = load("digits")

    def start(given, epoch):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            facts = facts_of_data(given, place, part)
        part.begin(epoch, facts["data"])
        return facts, "the data changed since the last start" in caplog.text

    facts, said = start(data, 0)
    assert (set(facts), said) == ({"data"}, False)
    assert start(data, 10) == (facts, False)
    now, said = start(digits, 20)
    assert said
    assert now == {"data": keyed_fingerprint(digits, site.data_key()), "data_before": facts["data"]}
    history = [{"epoch": 0, "fingerprint": facts["data"]}, {"epoch": 20, "fingerprint": now["data"]}]
    assert part.data() == history
    start(digits, 15)                                       # from an older checkpoint
    assert part.data() == [history[0], history[1] | {"epoch": 15}]
    start(data, 12)
    assert part.data() == history[:1]


def test_without_the_sites_key_it_is_said_that_the_fingerprint_is_missing(site, tmp_path, data, caplog):
    site.key.unlink()
    assert facts_of_data(data, InFederation(site.path), Part(tmp_path, 0, [0])) == {}
    assert "run `qg site renew --key FILE` once" in caplog.text
    assert SiteFolder(site.path).data_key() is None


# ---------------------------------------------------------------------------------------- backups (docs/deploy.md)


def restored(backup, place):
    """A folder as it was when it was backed up."""
    shutil.rmtree(place)
    shutil.copytree(backup, place)


def test_a_restored_site_knows_only_the_file_of_its_backup_until_it_gets_the_newest(tmp_path):
    organiser, (site, *_) = enrolled(tmp_path)
    site.renew(timedelta(seconds=1))
    shutil.copytree(site.path, tmp_path / "backup")
    old = site.text()
    organiser.revoke("cork")
    site.accept(organiser.file.read_bytes())
    with pytest.raises(InputError, match="has serial 2, but 3 was seen here; ask for the newest file"):
        site.accept(old)
    restored(tmp_path / "backup", site.path)
    site = SiteFolder(site.path)
    assert [one.name for one in site.federation().sites] == ["aachen", "basel", "cork", "delft"]    # cork is back
    assert site.accept(organiser.file.read_bytes())         # `qg site install`, or from a neighbour
    assert [one.name for one in site.federation().sites] == ["aachen", "basel", "delft"]
    with pytest.raises(InputError, match="has serial 2, but 3 was seen here; ask for the newest file"):
        site.accept(old)
    time.sleep(max(0.0, (site.shown().ends - now()).total_seconds() + 1))
    ended = site.certificate.read_bytes()
    site.client_context()                                   # a certificate that ended meanwhile is made anew
    assert site.certificate.read_bytes() != ended
    for lost in (site.certificate, site.data, site.newest):
        lost.unlink()
    site.client_context()
    assert {mode(path) for path in (site.key, site.certificate, site.data)} == {0o600}


def test_a_restored_organiser_needs_the_newest_file_of_a_site(tmp_path):
    organiser, (site, *_) = enrolled(tmp_path)
    shutil.copytree(organiser.path, tmp_path / "backup")
    organiser.revoke("cork")
    site.accept(organiser.file.read_bytes())
    restored(tmp_path / "backup", organiser.path)
    organiser.extend(60)                                    # a second file with serial 3
    with pytest.raises(InputError, match="differs from another file with serial 3"):
        site.accept(organiser.file.read_bytes())
    restored(tmp_path / "backup", organiser.path)
    shutil.copy(site.file, organiser.file)
    organiser.extend(60)
    assert site.accept(organiser.file.read_bytes())
    assert (site.federation().serial, len(site.federation().sites)) == (4, 3)
