"""The record of a site's connections: a chain of lines, and what it says."""

import hashlib
import json
import re
import threading

import pytest

from quasiglobal.cli.federation import audit
from quasiglobal.cli.terminal import console
from quasiglobal.errors import InputError
from quasiglobal.peers.audit import Trail, append
from quasiglobal.peers.sites import Audit

VERSION_2 = [
    {"time": "2026-01-01T10:00:00.000+00:00", "event": "started", "federation": "f", "serial": 2, "node": 0,
     "neighbours": [1], "step": 0},
    {"time": "2026-01-01T10:00:01.000+00:00", "event": "connected", "node": 1, "address": "10.0.0.2",
     "certificate": "c" * 64, "key": "a" * 64, "until": "2026-01-08T00:00:00+00:00", "step": 0, "library": "2.0.0",
     "serial": 2},
    {"time": "2026-01-01T10:05:00.000+00:00", "event": "closed", "node": 1, "sent": 7000, "received": 8000,
     "step": 50},
]
"""Lines of an audit file of version 2."""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "stderr", False)
    return tmp_path / "audit.jsonl"


def write(path, *events):
    log = Audit(path)
    for event in events:
        log.record(event, step=0)


def test_every_line_has_the_hash_of_the_line_before(path):
    write(path, "a", "b", "c")
    lines = path.read_bytes().splitlines()
    before = [json.loads(line)["before"] for line in lines]
    assert before == [hashlib.sha256(text).hexdigest() for text in (b"", *lines[:-1])]
    found = Trail.read(path)
    assert (found.breaks, found.unchained, found.torn) == ({}, 0, [])
    assert found.last_hash == hashlib.sha256(lines[-1]).hexdigest()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_restart_continues_the_chain_and_long_lines_too(path):
    write(path, "a")
    Audit(path).record("federation", sites=["x" * 40] * 3000)       # much longer than a block
    write(path, "b")
    assert Trail.read(path).breaks == {}
    assert [line["event"] for line in Trail.read(path).lines] == ["a", "federation", "b"]


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (lambda lines: [*lines[:3], lines[3].replace(b'"step": 0', b'"step": 1'), *lines[4:]], 5),
        (lambda lines: [*lines[:3], *lines[4:]], 4),
        (lambda lines: [*lines[:3], lines[1], *lines[3:]], 4),
        (lambda lines: [*lines[:3], b'{"event": "d"}', *lines[4:]], 4),
        (lambda lines: [*lines[:3], b"rubbish", *lines[4:]], 4),
        (lambda lines: lines[1:], 1),
    ],
)
def test_a_changed_removed_or_inserted_line_breaks_the_chain_there(path, change, at):
    write(path, *"abcdef")
    path.write_bytes(b"\n".join([*change(path.read_bytes().splitlines()), b""]))
    assert min(Trail.read(path).breaks) == at
    with pytest.raises(InputError, match=rf"^the chain of {re.escape(str(path))} breaks at line {at}, which "):
        audit(path)
    write(path, "g")                                        # the chain continues after the break
    assert max(Trail.read(path).breaks) <= at + 1


def test_a_cut_tail_is_found_by_a_hash_that_was_kept_elsewhere(path, capsys):
    write(path, *"abcd")
    kept = Trail.read(path).last_hash
    write(path, "e")
    audit(path, hash=kept)
    assert "The given hash is that of line 4: all lines up to it are as they were then." in capsys.readouterr().out
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    audit(path)                                             # it looks the same
    assert "rewritten as a whole, or has lost its last lines, looks the same." in capsys.readouterr().out
    for noted in (kept, ""):                                # a script may have lost its note
        with pytest.raises(InputError, match="has the given hash: it was rewritten, or its last lines are missing"):
            audit(path, hash=noted)


@pytest.mark.parametrize("whole", [b"", b"abc"])
def test_a_torn_line_stays_and_is_chained_too(path, whole):
    write(path, *whole.decode())
    torn = b'{"time": "2026-01-01T10'
    with open(path, "ab") as file:
        file.write(torn)
    assert Trail.read(path).torn == [len(whole) + 1]
    write(path, "d", "e")
    found = Trail.read(path)
    assert (found.breaks, found.torn) == ({}, [len(whole) + 1])
    assert path.read_bytes().split(b"\n")[len(whole)] == torn
    for other in (torn[:-1] + b"\n", b""):                  # changed, or removed
        (path.parent / "other").write_bytes(path.read_bytes().replace(torn + b"\n", other))
        assert min(Trail.read(path.parent / "other").breaks) <= len(whole) + 2


def test_lines_of_version_2_are_read_and_covered_by_the_first_chained_line(path, capsys):
    path.write_text("".join(json.dumps(line) + "\n" for line in VERSION_2))
    assert (Trail.read(path).unchained, Trail.read(path).breaks) == (3, {})
    audit(path)
    said = capsys.readouterr().out
    assert "Lines 1 to 3 are not chained: version 2 wrote them." in said
    assert "The chain of 0 lines does not break." in said
    assert "7 kB" in said
    write(path, "d", "e")
    assert (Trail.read(path).unchained, Trail.read(path).breaks) == (3, {})
    path.write_text(path.read_text().replace('"sent": 7000', '"sent": 7'))
    assert list(Trail.read(path).breaks) == [4]


def test_two_writers_make_one_chain(path):
    threads = [threading.Thread(target=write, args=(path, *["a"] * 50)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Trail.read(path)
    assert (len(found.lines), found.breaks) == (200, {})


def test_the_command_answers_who_when_with_which_key_what_and_how_much(path, capsys):
    log, key = Audit(path), {"key": "b" * 64, "certificate": "c" * 64}
    own = {"node": 0, "site": "aachen", "key": "a" * 64, "version": "2.1", "experiment": "e1", "data": "d" * 64}
    for start in (0, 30):                                   # the first one is killed
        log.record("started", **own, federation="f", step=start)
        for number in range(2):
            log.record("connected", connection=number, node=1 + number, site=f"s{number}", address="10.0.0.2:1", **key)
        edges = [{"connection": k, "node": 1 + k, "sent": 1000 + k + start, "received": 5} for k in range(2)]
        log.record("traffic", edges=edges, step=start + 20)
    log.record("refused", who="10.0.0.9", reason="it is not in the file", times=3)
    log.record("closed", connection=1, node=2, sent=2000, received=6, step=60)
    log.record("finished", **own, status="stopped", step=61)
    append(path, {"time": "now", "event": "closed", "node": "rubbish"})     # somebody's, not ours
    audit(path, json=True)
    told = json.loads(capsys.readouterr().out)
    assert [(one["site"], one["end"], one["sent"], one["received"]) for one in told["connections"]] == [
        ("s0", None, 1000, 5), ("s1", None, 1001, 5), ("s0", None, 1030, 5), ("s1", "closed", 2000, 6),
    ]
    assert [(one["end"], one["steps"], one["data"]) for one in told["processes"]] == [
        (None, [0, 20], "d" * 64), ("stopped", [30, 61], "d" * 64),
    ]
    assert [one["event"] for one in told["events"]] == ["refused", "closed"]
    assert (told["breaks"], told["lines"]) == ([], 12)
    audit(path)
    said = capsys.readouterr().out
    for word in ("node 2 (s1)", "10.0.0.2:1", "2 kB", "bbbb", "aachen", "it is not in the file", "not recorded"):
        assert word in said


ODD = b"".join(
    b'{"event": "%s", "time": [], "node": 1, "step": 0, "key": [], "edges": [1], "sent": "x", "status": 3}\n' % event
    for event in (b"finished", b"started", b"connected", b"traffic", b"closed", b"finished", b"other")
)


ENDLESS = b'{"event": "started", "time": "", "node": 0, "step": 1e999}\n'


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"[1]\n", b"\xff\x00\n" * 3, b'{"event": [1]}\n{"event": {}}\n', ODD, ENDLESS]
)
def test_a_file_of_rubbish_is_read_without_an_error(path, content):
    path.write_bytes(content)
    audit(path)
    write(path, "a")
    assert Trail.read(path).breaks == {}


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*audit.jsonl: No such file"):
        audit(tmp_path)
