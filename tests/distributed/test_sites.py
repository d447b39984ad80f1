"""Sites that connect, and all who are refused: each with the reason, on both sides."""

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import SimpleNamespace

import federations
import pytest
import torch
from connections import at_once, shaken, soon
from federations import Sites

from quasiglobal.engines.distributed import LateModels
from quasiglobal.errors import InputError
from quasiglobal.peers import greeting, tls
from quasiglobal.peers import sites as module
from quasiglobal.peers.certificates import SKEW, issue, minute, now, read_key, write_private
from quasiglobal.peers.edge import Edge, Expected, Lost, Refused
from quasiglobal.peers.membership import Membership, Terms
from quasiglobal.peers.sites import Audit, SiteOpener
from quasiglobal.runs.agreement import refuse_between_sites
from quasiglobal.training.experiment import Experiment


class Meeting:
    """Openers of sites in this process; `close` ends them and their edges."""

    def __init__(self, folder):
        self.folder, self.openers, self.edges = folder, {}, []

    def site(self, site, neighbours=(0, 1), experiment="e", topology="t", step=0, **how):
        """The opener of a site, on these terms."""
        path = self.folder / f"{len(self.openers)}.jsonl"
        opener = SiteOpener(site, audit=Audit(path), **how)
        node = opener.site.node
        others = [there for there in neighbours if there != node]
        opener.begin(Terms(node, others, experiment, topology, 2.0, lambda: step))
        self.openers[opener] = path
        return opener

    def met(self, first, second, seconds=3.0):
        """Let two sites open their edge; return the edges, or the reasons why there is none."""
        refused = threading.Event()

        def work(here, there):
            def opened():
                deadline, why = soon(seconds), "nobody came"
                while time.monotonic() < deadline and not refused.is_set():
                    try:
                        return here.open(there.site.node, 0.1)
                    except Refused as error:
                        refused.set()
                        return str(error)
                    except Lost as error:
                        why = str(error)
                return why
            return opened

        found = at_once(work(first, second), work(second, first))
        self.edges += [edge for edge in found if not isinstance(edge, str)]
        return found

    def recorded(self, opener, event):
        """The audit log's lines of this kind."""
        lines = [json.loads(line) for line in self.openers[opener].read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def close(self):
        for opener in self.openers:
            opener.stop()
        for edge in self.edges:
            edge.close()
        for opener in self.openers:
            opener.close()


@pytest.fixture
def meeting(tmp_path):
    made = Meeting(tmp_path)
    yield made
    made.close()


@pytest.fixture
def sites(tmp_path):
    return Sites(tmp_path, "ring:4", 4)


def until(condition, seconds=10):
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def test_neighbours_open_an_edge_and_tell_their_steps(meeting, sites):
    first, second = (meeting.site(sites.folders[k], step=7 + k) for k in range(2))
    edges = meeting.met(first, second)
    assert [edge.step_there for edge in edges] == [8, 7]
    meeting.close()
    (connected,), (closed,) = meeting.recorded(first, "connected"), meeting.recorded(first, "closed")
    assert connected["key"] == sites.folders[1].own().fingerprint
    assert (connected["node"], connected["step"]) == (1, 8)
    assert closed["node"] == 1


@pytest.mark.parametrize("what", ["experiment", "topology"])
def test_another_experiment_or_topology_is_named_on_both_sides(meeting, sites, what):
    first, second = meeting.site(sites.folders[0], **{what: "mine"}), meeting.site(sites.folders[1], **{what: "other"})
    for _ in range(3):
        assert f"its {what} is mine, not other" in meeting.met(first, second)[1]
    until(lambda: meeting.recorded(first, "refused"))
    (refusal,) = meeting.recorded(first, "refused")         # once, however often it dials
    assert f"its {what} is other, not mine" in refusal["reason"]


def test_who_is_not_a_neighbour_is_refused_and_told_so(meeting, sites):
    first, stranger = meeting.site(sites.folders[0], neighbours=(1, 3)), meeting.site(sites.folders[2], (0, 1, 3))
    why = meeting.met(first, stranger)[1]
    assert why == "it refused this node: node 2 (site2) is not a neighbour of node 0 (site0) in this topology"
    until(lambda: meeting.recorded(first, "refused"))
    assert "node 2 (site2) is not a neighbour" in meeting.recorded(first, "refused")[0]["reason"]


def test_another_federation_is_refused_by_tls_on_both_sides(meeting, sites, tmp_path):
    """Both have the same name and addresses; the keys differ."""
    (tmp_path / "other").mkdir()
    other = Sites(tmp_path / "other", "ring:4", 4, addresses=sites.addresses)
    first, stranger = meeting.site(sites.folders[0]), meeting.site(other.folders[1])
    why = meeting.met(first, stranger)[1]
    assert why.startswith("its key is not in this site's federation file: it is revoked or not approved yet; ask")
    until(lambda: meeting.recorded(first, "refused"))
    told = meeting.recorded(first, "refused")[0]["reason"]
    assert told.startswith("its federation file does not have this site's key: this site is revoked or not approved")


def certified(site, **how):
    """Give a site a TLS certificate of this kind."""
    terms = {"federation": "trial", "node": site.own().node} | how
    write_private(site.certificate, issue(read_key(site.key), **terms))


def test_an_ended_certificate_is_refused_on_both_sides(meeting, sites, monkeypatch):
    first, late = meeting.site(sites.folders[0]), sites.folders[1]
    certified(late, lifetime=timedelta(minutes=20), at=now() - timedelta(minutes=30))
    monkeypatch.setattr(late, "_renew_if_due", lambda federation: None)
    why = meeting.met(first, meeting.site(late))[1]
    ended = "the certificate of node 1 (site1) ended at "
    assert f"it refused this node: {ended}" in why
    until(lambda: meeting.recorded(first, "refused"))
    assert meeting.recorded(first, "refused")[0]["reason"].startswith(ended)


def test_a_clock_that_is_two_hours_slow_is_named_on_both_sides_with_both_times(meeting, sites, monkeypatch, caplog):
    slow, right, real = sites.folders[0], sites.folders[1], now()
    certified(right, at=real)
    monkeypatch.setattr(right, "_renew_if_due", lambda federation: None)
    monkeypatch.setattr(greeting, "now", lambda: real)      # only site 1 has to say its time there
    for clock in ("certificates", "folders", "federation_file"):
        monkeypatch.setattr(f"quasiglobal.peers.{clock}.now", lambda: real - timedelta(hours=2))
    first = meeting.site(slow)
    why = meeting.met(first, meeting.site(right))[1]
    sentence = (
        f"the certificate of node 1 (site1) begins at {minute(real - SKEW)}, and it is "
        f"{minute(real - timedelta(hours=2))} by the clock of node 0 (site0); compare `date -u` at both"
    )
    assert why == f"it refused this node: {sentence}; it is {minute(real)} by the clock of this node"
    until(lambda: meeting.recorded(first, "refused"))
    assert meeting.recorded(first, "refused")[0]["reason"] == sentence
    assert f"refused 127.0.0.1: {sentence}" in caplog.messages


def test_a_name_that_cannot_be_found_is_said_at_once_and_again_each_minute(meeting, sites, monkeypatch, caplog):
    def unknown(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    second = meeting.site(sites.folders[1])
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for minutes in (1, 2):
        for _ in range(3):
            with pytest.raises(Lost, match="Name or service not known"):
                second.open(0, 0.1)
        said = f"node 0 (site0) cannot be reached at {sites.addresses[0]}: Name or service not known; trying again"
        assert caplog.messages.count(said) == minutes
        second.reports.write_rest(0.0)
        assert caplog.messages.count("… and 2 more about node 0 (site0) in the last minute") == minutes


def test_a_revoked_site_reads_that_its_neighbours_do_not_have_its_key(meeting, sites, monkeypatch, caplog):
    monkeypatch.setattr(module, "WATCH", 0.1)
    first, revoked = (meeting.site(sites.folders[k]) for k in (0, 1))
    sites.organiser.revoke("site1")
    assert sites.folders[0].accept(sites.text)
    until(lambda: first.federation.serial == 3)
    for why in meeting.met(first, revoked):
        assert why in (tls.UNKNOWN_THERE, "it is not in the federation file")
    assert "unknown ca" not in caplog.text
    assert "revoked or not approved yet; ask the organiser" in meeting.recorded(revoked, "refused")[0]["reason"]


@pytest.mark.parametrize(
    ("claim", "match"),
    [
        ({"node": 3}, "the certificate is signed by another site's key"),
        ({"federation": "rival"}, "the certificate is for federation rival, this is trial"),
    ],
)
def test_a_certificate_with_a_wrong_claim_is_refused_on_both_sides(meeting, sites, monkeypatch, claim, match):
    first, liar = meeting.site(sites.folders[0], (1, 3)), sites.folders[1]
    certified(liar, **claim)
    monkeypatch.setattr(liar, "_renew_if_due", lambda federation: None)
    why = meeting.met(first, meeting.site(liar))[1]
    assert f"it refused this node: {match}" in why
    until(lambda: meeting.recorded(first, "refused"))
    assert match in meeting.recorded(first, "refused")[0]["reason"]


def test_another_protocol_is_refused_and_another_library_version_is_not(meeting, sites, monkeypatch, caplog):
    def refusal(connection, protocol):
        with pytest.raises(Refused) as refused:
            greeting.exchange(connection, greeting.Greeting(protocol, "1", "e", "t", 0, 0, 1, "s"), soon(5))
        return str(refused.value)

    ends = shaken(*sites.folders[:2])
    says = at_once(lambda: refusal(ends[0], 1), lambda: refusal(ends[1], 2))
    assert says[0].startswith("it speaks protocol 2, this node 1; install the same quasiglobal")
    assert says[1].startswith("it speaks protocol 1, this node 2; install the same quasiglobal")
    for end in ends:
        end.close()

    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    versions = iter(["0.9.9"])
    original = module._version
    monkeypatch.setattr(module, "_version", lambda: next(versions, original()))
    edges = meeting.met(first, second)
    assert not any(isinstance(edge, str) for edge in edges)
    assert "has quasiglobal 0.9.9, this node" in caplog.text or "this node 0.9.9" in caplog.text


def test_a_second_process_of_a_node_is_told_that_the_node_is_taken(meeting, sites):
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    assert not any(isinstance(edge, str) for edge in meeting.met(first, second))
    again = SiteOpener(sites.folders[1], listen="127.0.0.1:0")
    again.begin(Terms(1, [0], "e", "t", 2.0, lambda: 0))
    with pytest.raises(Lost, match=r"node 1 \(site1\) is taken"):
        again.open(0, 3.0)
    again.stop()
    meeting.edges[1].close()                                # the first one ends: the node is free
    until(lambda: not meeting.edges[0].channel.alive)
    third = meeting.site(sites.folders[1], listen="127.0.0.1:0")
    assert not any(isinstance(edge, str) for edge in meeting.met(first, third))


def test_the_same_process_may_dial_again_at_once(meeting, sites):
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    old = meeting.met(first, second)
    new = meeting.met(first, second)
    assert new[0] is not old[0]
    assert not old[0].channel.alive


def test_slow_and_silent_strangers_block_nobody(meeting, sites):
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    host, port = sites.addresses[0].split(":")
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(30)]
        for one in slow[:15]:
            one.send(b"\x16")                               # the first byte of a handshake, and no more
        began = time.monotonic()
        assert not any(isinstance(edge, str) for edge in meeting.met(first, second))
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("stage", ["handshake", "greeting"])
def test_a_byte_now_and_then_does_not_prolong_the_deadline(meeting, sites, monkeypatch, stage):
    monkeypatch.setattr(module, "ADMISSION", 0.6)
    monkeypatch.setattr(module, "FAREWELL", 0.1)
    first = meeting.site(sites.folders[0])
    host, port = sites.addresses[0].split(":")
    connection = socket.create_connection((host, int(port)), 5)
    data = b"\x16\x03\x01\x02\x00" + bytes(100)            # a handshake that promises 512 bytes
    if stage == "greeting":
        connection = sites.folders[1].client_context().wrap_socket(connection)
        data = greeting.START.pack(greeting.MAGIC, 500) + bytes(100)

    def trickle():
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    began = time.monotonic()
    with connection, pytest.raises(OSError, match=r"."):
        trickle()
    assert time.monotonic() - began < 5
    until(lambda: not first._listener._waiting)


def test_a_flood_from_one_address_leaves_room_for_others_and_is_bounded(meeting, sites, monkeypatch):
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    host, port = sites.addresses[0].split(":")
    stop = threading.Event()

    def flood():
        held = []
        while not stop.is_set():
            try:
                held.append(socket.create_connection((host, int(port)), 1, source_address=("127.0.0.9", 0)))
            except OSError:
                stop.wait(0.01)
            for one in held[:-200]:
                one.close()
            held = held[-200:]
        for one in held:
            one.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        until(lambda: len(first._listener._waiting) >= module.MOST_WAITING - 1)
        edges = meeting.met(first, second, 10)
        assert not any(isinstance(edge, str) for edge in edges)
        assert len(first._listener._waiting) <= module.MOST_WAITING
        assert threading.active_count() < 3 * module.MOST_WAITING
    finally:
        stop.set()
        thread.join()


def test_a_recorded_connection_is_of_no_use(meeting, sites, monkeypatch):
    """Somebody on the way has every byte that a site sent, its greeting included, and sends them again."""
    host, port = sites.addresses[0].split(":")
    heard = bytearray()

    def pass_on(source, sink, keep):
        with suppress(OSError):
            while data := source.recv(65536):
                keep += data
                sink.sendall(data)

    with socket.create_server((host, 0)) as tap, ExitStack() as stack:
        def relay():
            near, far = tap.accept()[0], socket.create_connection((host, int(port)))
            for one in (near, far):
                stack.callback(one.close)
            threading.Thread(target=pass_on, args=(far, near, bytearray()), daemon=True).start()
            pass_on(near, far, heard)

        threading.Thread(target=relay, daemon=True).start()
        place = socket.AF_INET, socket.SOCK_STREAM, 0, "", tap.getsockname()
        monkeypatch.setattr(module, "resolved", lambda *_: [place])
        first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
        edges = meeting.met(first, second)
        for edge in edges:
            edge.listen(1000)
        assert len(heard) > 1000, "a handshake with a certificate, and a greeting"
        with socket.create_connection((host, int(port)), 5) as again:
            again.sendall(bytes(heard))
            with suppress(ConnectionError):
                while again.recv(65536):
                    pass
        until(lambda: meeting.recorded(first, "refused"))
        assert len(meeting.recorded(first, "connected")) == 1
        edges[1].send((1, 0), torch.ones(3), 5)
        assert edges[0].receive((1, 0), Expected(3, torch.float32), 5) is not None


def test_no_descriptors_left_is_survived(meeting, sites, monkeypatch, caplog):
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    accept, left = first._listener._socket.accept, [3]

    class Exhausted:
        def accept(self):
            if left[0]:
                left[0] -= 1
                raise OSError(24, "Too many open files")
            return accept()

        def __getattr__(self, name):
            return getattr(first_socket, name)

    first_socket, first._listener._socket = first._listener._socket, Exhausted()
    with socket.create_connection(first_socket.getsockname()):
        pass                                                # ends the call of `accept` under way
    assert not any(isinstance(edge, str) for edge in meeting.met(first, second))
    assert left == [0]
    assert caplog.text.count("cannot accept connections") == 1


@pytest.mark.parametrize(("files", "most"), [(1024, 64), (256, 32), (64, 8), (8, 2), (-1, 64)])
def test_few_descriptors_mean_few_connections_that_wait(monkeypatch, files, most):
    monkeypatch.setattr(module.resource, "getrlimit", lambda which: (files, files))
    assert module.most_waiting() == most


def members_of(site, step, neighbours=(0, 1, 2), result=None, model=None):
    """The membership of a site at a step of a run with 10 steps, which gives its result if it has ended."""
    opener = SiteOpener(site)
    here = opener.site.node
    models = LateModels(lambda: model)
    models.model, models.result = Expected(2, torch.float64), Expected(3, torch.float64)
    models.result_here = None if result is None else lambda: result
    members = Membership(
        opener, here, [there for there in neighbours if there != here], experiment="e", topology="t", timeout=1.0,
        handover=models,
    )
    members.step, members.last_step = step, 10
    return members


RESULT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def test_a_site_that_missed_the_end_takes_the_result_of_neighbours_that_have_ended(sites):
    late = members_of(sites.folders[1], step=3)             # node 0 listens for it, node 2 dials it
    first, third = (members_of(sites.folders[k], 0, result=RESULT + k) for k in (0, 2))
    try:
        at_once(lambda: late.find(4.0), *(lambda one=one: one.hand_out([1], 4.0) for one in (first, third)))
        assert late.over
        assert late.handover.results.keys() == {0, 2}
        assert all(late.handover.results[k].equal(RESULT + k) for k in (0, 2))
        assert not late.handover.taken
        assert first.handover.went_to == third.handover.went_to == {1}
    finally:
        late.close()


@pytest.mark.parametrize("given", [torch.cat([RESULT, RESULT]), RESULT * torch.nan], ids=["larger", "nan"])
def test_a_result_of_another_size_or_without_numbers_is_not_taken(sites, given):
    late, liar = members_of(sites.folders[1], step=3, neighbours=(0, 1)), members_of(sites.folders[0], 0, result=given)
    try:
        at_once(lambda: late.find(4.0), lambda: liar.hand_out([1, 3], 1.0))
        assert late.over
        assert late.handover.results == {}
    finally:
        late.close()


def test_no_run_ends_while_a_neighbour_trains_and_two_that_have_ended_take_nothing(sites):
    late, liar = members_of(sites.folders[1], step=3), members_of(sites.folders[0], 0, result=RESULT)
    trains = members_of(sites.folders[2], step=4, neighbours=(1, 2), model=RESULT[:2])
    try:
        at_once(lambda: late.find(4.0), lambda: trains.find(4.0), lambda: liar.hand_out([1], 4.0))
        assert not late.over                                # whatever one neighbour says
        assert late.step_of_others == 4
        assert len(late.handover.taken) == 1
    finally:
        for one in (late, trains):
            one.close()
    both = [members_of(sites.folders[k], 0, neighbours=(0, 1), result=RESULT) for k in (0, 1)]
    at_once(lambda: both[0].hand_out([1], 4.0), lambda: both[1].hand_out([0], 4.0))
    assert both[0].handover.went_to == both[1].handover.went_to == set()


@pytest.mark.parametrize("ends", [True, False])
def test_a_neighbour_that_ended_before_is_not_missing(sites, ends, caplog):
    first, second = (members_of(sites.folders[k], 0, neighbours=(0, 1)) for k in (0, 1))
    try:
        at_once(*(lambda one=one: one.find(4.0) for one in (first, second)))
        at_once(*(lambda one=one: one.begin(1000) for one in (first, second)))
        if ends:
            first.end()
        first.close()
        with second.watched(0):
            second.edges[0].receive((1, 0), Expected(1, torch.float32), 5)
        assert second.missing == ([] if ends else [0])
        assert second.lost == {0: "it has ended" if ends else "it closed the connection"}
        said = f"node 1 (site1) continues without node 0 (site0) from step 0: {second.lost[0]}"
        assert caplog.messages.count(said) == 1
    finally:
        second.close()


def test_a_newer_file_is_passed_on_and_a_revoked_site_is_cut(meeting, sites, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    first, second, third = (meeting.site(sites.folders[k], (0, 1, 2)) for k in range(3))
    for pair in ((first, second), (second, third), (first, third)):
        assert not any(isinstance(edge, str) for edge in meeting.met(*pair))
    for edge in meeting.edges:
        edge.listen(1000)
    sites.organiser.revoke("site2")
    assert sites.folders[0].accept(sites.text)              # it arrives at one site, which passes it on
    with pytest.raises(Lost, match="revoked by federation file 3"):
        meeting.edges[4].receive((1, 0), Expected(1, torch.float32), 10)
    until(lambda: second.federation.serial == 3)
    assert sites.folders[1].federation().serial == 3
    with pytest.raises(Lost, match="revoked by federation file 3"):
        meeting.edges[2].receive((1, 0), Expected(1, torch.float32), 10)
    assert meeting.edges[0].channel.alive
    assert not second.expects(2)
    with pytest.raises(Lost, match="not in the federation file"):
        second.open(2, 0.1)
    assert meeting.recorded(second, "revoked")[0]["node"] == 2


def test_older_and_foreign_files_over_an_edge_change_nothing(meeting, sites, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    (tmp_path / "other").mkdir()
    other, older = Sites(tmp_path / "other", "ring:4", 4), sites.text
    sites.organiser.extend(40)
    sites.folders[0].accept(sites.text)
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    edges = meeting.met(first, second)
    for edge in edges:
        edge.listen(1000)
    for note in (older, other.text, b"{}", b"\0" * 1000):
        edges[1].send_note(note)
    until(lambda: len(meeting.recorded(first, "refused")) == 3)
    assert first.federation.serial == 3
    assert edges[0].listening
    until(lambda: second.federation.serial == 3)            # and this one got the newer


def test_connections_are_renewed_before_a_certificate_ends(meeting, sites, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    edges = meeting.met(first, second)
    for edge in edges:
        edge.listen(1000)
    before = meeting.recorded(first, "connected")[0]["certificate"]
    certified(sites.folders[1])                             # a fresh one for the next connection
    link = second._links.to(0)
    link.begun, link.ends = now() - timedelta(minutes=1), now() + timedelta(seconds=10)
    until(lambda: meeting.recorded(first, "renewed"))
    assert meeting.recorded(first, "renewed")[0]["certificate"] != before
    for step in range(1, 20):
        edges[0].send((step, 0), torch.ones(3), 5)
        assert edges[1].receive((step, 0), Expected(3, torch.float32), 5) is not None
    until(lambda: meeting.recorded(second, "closed"))
    assert second._links.to(0).ends - now() > timedelta(days=1)


def test_an_edge_whose_certificate_ended_is_cut(meeting, sites, monkeypatch):
    monkeypatch.setattr(module, "WATCH", 0.1)
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    edges = meeting.met(first, second)
    edges[0].listen(1000)
    first._links.to(1).ends = now() - timedelta(seconds=1)
    with pytest.raises(Lost, match="a certificate ended"):
        edges[0].receive((1, 0), Expected(1, torch.float32), 10)


def test_names_that_are_found_late_do_not_block_a_stop(meeting, sites, monkeypatch):
    second = meeting.site(sites.folders[1])
    done = threading.Event()

    def never(*arguments, **options):
        done.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(module, "LOOK_UP", 0.3)
    began = time.monotonic()
    with pytest.raises(Lost, match="in time"):
        second.open(0, 0.2)
    monkeypatch.setattr(module, "LOOK_UP", 30)
    threading.Timer(0.3, second.stop).start()
    with pytest.raises(Lost, match="in time"):
        second.open(0, 0.2)
    assert time.monotonic() - began < 5
    done.set()


def test_names_that_are_found_late_are_used(meeting, sites, monkeypatch):
    first, second = meeting.site(sites.folders[0]), meeting.site(sites.folders[1])
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *of, **how: time.sleep(0.6) or look_up(*of, **how))
    monkeypatch.setattr(module, "ADMISSION", 0.5)
    edges = meeting.met(first, second)
    assert not any(isinstance(edge, str) for edge in edges)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_sites_meet_over_ipv6(meeting, tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    ports = federations.free_ports(2)
    sites = Sites(tmp_path, "complete:2", 2, addresses=[f"[::1]:{port}" for port in ports])
    edges = meeting.met(*(meeting.site(site) for site in sites.folders))
    assert not any(isinstance(edge, str) for edge in edges)


def test_a_site_that_only_dials_and_two_federations_on_one_machine(meeting, tmp_path):
    for name in ("one", "two"):
        (port,) = federations.free_ports(1)
        sites = Sites(tmp_path, "complete:2", 2, name=name, addresses=[None, f"127.0.0.1:{port}"])
        edges = meeting.met(*(meeting.site(site) for site in sites.folders))
        assert not any(isinstance(edge, str) for edge in edges)


def test_an_address_that_is_not_this_machines_is_refused_with_the_remedy(sites, tmp_path):
    far = Sites(tmp_path, "complete:2", 2, name="far", addresses=["192.0.2.1:7443", "192.0.2.2:7443"])
    opener = SiteOpener(far.folders[0])
    with pytest.raises(InputError, match=r"cannot listen at 192.0.2.1:7443: .*; name this machine's own address with"):
        opener.begin(Terms(0, [1], "e", "t", 2.0, lambda: 0))


@pytest.mark.parametrize("terms", [{"algorithm": "slowmo"}, {"communication": "merge@end"}], ids=str)
def test_exact_means_are_refused_with_the_reason(terms):
    refuse_between_sites(Experiment(algorithm="qg-dsgdm-n"))
    with pytest.raises(InputError, match="averages over all nodes: an exact mean over all nodes needs"):
        refuse_between_sites(Experiment(**terms))
    with pytest.raises(InputError, match="decentlam collapses when a message is lost, as between sites"):
        refuse_between_sites(Experiment(algorithm="decentlam"))


def test_methods_that_a_failing_network_harms_say_so():
    with pytest.warns(UserWarning, match="momentum-tracking loses its exactness when messages are lost"):
        refuse_between_sites(Experiment(algorithm="momentum-tracking"))
    with pytest.warns(UserWarning, match="push-diging:sums=true misses the minimum, or diverges"):
        refuse_between_sites(Experiment(algorithm="push-diging:sums=true"))


def test_the_audit_log_counts_repeated_refusals_and_survives_a_full_disk(tmp_path, caplog):
    log = Audit(tmp_path / "audit.jsonl")
    for _ in range(100):
        log.refuse("strangers", "why", "10.0.0.1")
    log.reports.write_rest(0.0)
    log.refuse("strangers", "why", "10.0.0.2")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["event"], line["who"], line.get("times")) for line in lines] == [
        ("refused", "strangers", None), ("left out", "strangers", 99), ("refused", "strangers", None),
    ]
    full = Audit(tmp_path / "missing" / "audit.jsonl")
    full.record("started")
    full.record("started")
    assert caplog.text.count("connections are not recorded") == 1


@pytest.mark.parametrize("host", ["st-james..example", "a" * 64 + ".example"])
def test_an_address_that_is_no_host_name_is_said_at_once(host):
    began = time.monotonic()
    with pytest.raises(OSError, match="is not the name of a host"):
        module.resolved(host, 7443, 30.0, threading.Event())
    assert time.monotonic() - began < 10


def test_an_earlier_connection_does_not_replace_one_that_ended():
    """As when a certificate is renewed, and the new connection ends before both sides have moved to it."""
    def link(ended):
        channel = SimpleNamespace(alive=not ended, ended=threading.Event())
        if ended:
            channel.ended.set()
        return SimpleNamespace(edge=edge, channel=channel, identity=SimpleNamespace(node=1))

    edge, links = object(), module.Connections()
    links.take(link(ended=False))
    links.take(link(ended=True))
    assert links.to(1) is None
    assert len(links.take_ended()) == 1
    assert links.to(1) is None


def test_an_edge_that_is_cut_while_it_sends_says_why():
    class Closes:
        def send(self, message):
            edge.cut("revoked by federation file 3")
            raise Lost("this process closed the connection")

        def close(self):
            pass

    edge = Edge(0, 1, Closes(), 1)
    with pytest.raises(Lost, match="revoked by federation file 3"):
        edge.send((1, 0), torch.zeros(2), 1.0)
