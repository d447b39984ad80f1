"""Who may take part: keys, requests, the signed federation file, certificates, and TLS between sites."""

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import stat
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import inside

from quasiglobal.cli.federation import SUBCOMMANDS
from quasiglobal.errors import InputError
from quasiglobal.peers import certificates, federation_file
from quasiglobal.peers.certificates import LIFETIME, LONGEST_LIFETIME, SKEW, issue, minute, now
from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.topology.parsing import pairs_of

NAMES = ("aachen", "basel", "cork", "delft")

RING = pairs_of("ring:4")


def enrolled(folder, name="tumours", only_dials=("delft",), topology="ring:4"):
    """An organiser and four sites, with certificates."""
    organiser = OrganiserFolder(folder / "organiser")
    organiser.new(name, topology, 30)
    sites = [SiteFolder(folder / site) for site in NAMES]
    asked = [
        site.request(name, called, None if called in only_dials else f"{called}.example:7443")[1]
        for site, called in zip(sites, NAMES, strict=True)
    ]
    organiser.approve(asked, 4, pairs_of(topology))
    for site in sites:
        site.pin(organiser.file.read_bytes(), "the file")
        site.accept(organiser.file.read_bytes())
    return organiser, sites


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A federation that no test changes."""
    return enrolled(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def federation(tmp_path):
    return enrolled(tmp_path)


def shake(server, client, dialler=None, listener=None):
    """Shake hands over a real socket; the certificate that each side saw, or the error of either side."""
    ours, theirs = socket.socketpair()
    found = {}

    def serve():
        try:
            with (listener or server.server_context()).wrap_socket(ours, server_side=True) as wire:
                wire.sendall(b"!")
                found["client"] = wire.getpeercert(binary_form=True)
                found["version"] = wire.version()
        except (OSError, InputError) as error:
            found["error"] = error
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with (dialler or client.client_context()).wrap_socket(theirs) as wire:
            wire.recv(1)
            found["server"] = wire.getpeercert(binary_form=True)
            found["reused"] = wire.session_reused
            found["ticket"] = wire.session.has_ticket if wire.session else False
    except (OSError, InputError) as error:
        found.setdefault("error", error)
        theirs.close()
    thread.join(10)
    return found


def test_neighbours_prove_who_they_are_over_tls_1_3(whole):
    _, (first, second, *_) = whole
    found = shake(first, second)
    assert found["version"] == "TLSv1.3"
    assert not found["ticket"]
    at_first, at_second = first.peer(found["client"]), second.peer(found["server"])
    assert (at_first.federation, at_first.node, at_second.node) == ("tumours", 1, 0)
    assert at_first.fingerprint == first.federation().site(1).fingerprint


def test_a_renewed_certificate_has_another_key_and_the_same_fingerprint(federation):
    _, (first, second, *_) = federation
    before = shake(first, second)["client"]
    old = second.certificate.read_bytes()
    second.renew()
    after = shake(first, second)["client"]
    assert before != after
    assert old.splitlines()[1] != second.certificate.read_bytes().splitlines()[1]
    assert first.peer(before).fingerprint == first.peer(after).fingerprint


def test_a_context_renews_in_the_last_third_and_keeps_the_lifetime(federation, monkeypatch):
    _, (first, *_) = federation
    first.renew(timedelta(days=3))
    start = first.shown()
    for days, renewed in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(certificates, "now", lambda days=days: start.begins + timedelta(days=days))
        first.client_context()
        assert (first.shown() != start) is renewed
    assert first.shown().ends - first.shown().begins == timedelta(days=3)


def test_a_damaged_certificate_is_made_anew(federation):
    _, (first, second, *_) = federation
    key = second.renew() and second.certificate.read_bytes().partition(b"-----BEGIN CERT")[0]
    certificate = first.renew() and first.certificate.read_bytes().partition(b"-----END PRIVATE KEY-----\n")[2]
    for damaged in (b"", b"\x00" * 100, key, key + certificate):
        first.certificate.write_bytes(damaged)
        with pytest.raises(InputError, match=r"tls.pem is damaged; run `qg site renew`"):
            first.client_context()
    first.renew()
    assert "error" not in shake(first, second)


def test_a_full_disk_does_not_end_connections_before_the_certificate(federation, monkeypatch, caplog):
    _, (first, *_) = federation
    start = first.renew(timedelta(days=3))

    def full(path, content):
        raise InputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(certificates, "write_private", full)
    for clock in ("certificates", "folders"):
        monkeypatch.setattr(f"quasiglobal.peers.{clock}.now", lambda: start.begins + timedelta(days=2.5))
    for _ in range(3):
        first.client_context()
    (said,) = caplog.messages
    assert re.search(r"ends .* UTC and cannot be renewed: cannot write .*tls.pem: No space left", said)
    for clock in ("certificates", "folders"):
        monkeypatch.setattr(f"quasiglobal.peers.{clock}.now", lambda: start.begins + timedelta(days=3.5))
    with pytest.raises(InputError, match="No space left"):
        first.client_context()


def test_a_context_has_a_key_and_a_certificate_that_fit_while_others_renew(federation, monkeypatch):
    _, (first, *_) = federation
    first.renew()
    real, began = ssl.SSLContext.load_cert_chain, threading.Event()
    renewals = []

    def load_slowly(context, path):
        """As OpenSSL, which opens the file for the certificate and again for the key."""
        whole = Path(path).read_bytes()
        began.set()
        renewals[0].join(0.3)                                           # it waits for the lock
        assert Path(path).read_bytes() == whole
        real(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_slowly)
    renewals.append(threading.Thread(target=lambda: began.wait(10) and first.renew()))
    renewals[0].start()
    before = first.certificate.read_bytes()
    first.client_context()
    renewals[0].join(10)
    assert first.certificate.read_bytes() != before


def test_a_site_without_its_key_works_until_its_certificate_ends(federation, monkeypatch, tmp_path):
    _, (first, *_) = federation
    first.renew()
    away = first.key.rename(tmp_path / "stick.key")
    first.client_context()
    with pytest.raises(InputError, match=r"cannot read .*site.key"):
        first.renew()
    assert first.renew(key=away).node == 0
    monkeypatch.setattr("quasiglobal.peers.folders.now", lambda: now() + timedelta(days=8))
    with pytest.raises(InputError, match=r"ended on .*; run `qg site renew --key FILE`"):
        first.client_context()
    with pytest.raises(InputError, match="is not the key that"):
        first.renew(key=federation[1][1].key)


def shown_by(site, *made):
    """A client context of a site that shows another certificate."""
    context = site.client_context()
    path = site.path / "other.pem"
    certificates.write_private(path, issue(*made))
    context.load_cert_chain(path)
    return context


def test_a_certificate_of_another_time_is_refused_with_the_times_and_the_clock(federation):
    """Only after the handshake: an alert of TLS would not tell the other side the times."""
    _, (first, second, *_) = federation
    key = certificates.read_key(second.key)
    hour = timedelta(hours=1)
    for made, match in ((now() - LIFETIME - hour, f"ended at {minute(now() - hour)}, and it is "),
                        (now() + hour, f"begins at {minute(now() + hour - SKEW)}, and it is ")):
        found = shake(first, second, shown_by(second, key, "tumours", 1, LIFETIME, made))
        with pytest.raises(InputError, match=rf"node 1 \(\w+\) {match}.* by the clock of node 0 \(\w+\); compare"):
            first.peer(found["client"])


def test_who_is_not_or_no_longer_in_the_federation_is_refused_in_the_handshake(federation, tmp_path):
    organiser, (first, second, third, _) = federation
    stranger = shown_by(second, certificates.new_key(tmp_path / "stranger.key"), "tumours", 1)
    assert "unable to get local issuer certificate" in str(shake(first, second, stranger)["error"])
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    assert "peer did not return a certificate" in str(shake(first, second, anonymous)["error"])
    organiser.revoke("basel")
    assert first.accept(organiser.file.read_bytes())
    assert third.accept(organiser.file.read_bytes())
    assert "certificate verify failed" in str(shake(first, second)["error"])
    assert "error" not in shake(first, third)
    assert second.accept(organiser.file.read_bytes())
    with pytest.raises(InputError, match=r"it is not approved yet, or revoked; ask the organiser"):
        second.client_context()


def test_a_site_cannot_pass_for_another_node_or_another_federation(federation):
    _, (first, second, *_) = federation
    key = certificates.read_key(second.key)
    found = shake(first, second, shown_by(second, key, "tumours", 2))
    with pytest.raises(InputError, match="signed by another site's key"):       # TLS itself cannot know
        first.peer(found["client"])
    with pytest.raises(InputError, match="for federation lungs, this is tumours"):
        first.peer(shake(first, second, shown_by(second, key, "lungs", 1))["client"])
    with pytest.raises(InputError, match="has no node 7"):
        first.peer(shake(first, second, shown_by(second, key, "tumours", 7))["client"])
    long = shake(first, second, shown_by(second, key, "tumours", 1, LONGEST_LIFETIME + timedelta(days=1)))
    with pytest.raises(InputError, match="valid for more than 31 days"):
        first.peer(long["client"])
    with pytest.raises(InputError, match="names no node"):
        first.peer(second.root.read_bytes())


def der_of(pem):
    return ssl.PEM_cert_to_DER_cert(pem[pem.index(b"-----BEGIN CERT") :].decode())


@pytest.mark.parametrize(("node", "days_ago", "why"), [
    (1, 8, "ended at .*, and it is .* by the clock of"),
    (1, -1, "begins at .*, and it is .* by the clock of"),
    ("01", 0, "names no node of a federation"),
    ("1/2", 0, "names no node of a federation"),
    ("1?", 0, "names no node of a federation"),
    ("-1", 0, "names no node of a federation"),
    ("9" * 6, 0, "names no node of a federation"),
    ("1\n", 0, "names no node of a federation"),
])  # fmt: skip
def test_the_certificate_is_checked_again_after_the_handshake(whole, node, days_ago, why):
    _, (first, second, *_) = whole
    made = issue(certificates.read_key(second.key), "tumours", node, LIFETIME, now() - timedelta(days=days_ago))
    with pytest.raises(InputError, match=why):
        first.peer(der_of(made))


def test_a_site_with_another_number_shows_another_certificate(federation):
    organiser, (first, second, *_) = federation
    assert second.peer(shake(first, second)["server"]).node == 0
    asked = federation_file.read_request((first.path / "request-aachen.json").read_bytes(), "it")
    organiser.revoke("cork")
    organiser.approve([asked], 4, RING, 2)
    for site in (first, second):
        site.accept(organiser.file.read_bytes())
    assert second.peer(shake(first, second)["server"]).node == 2


def test_two_federations_do_not_mix(federation, tmp_path):
    _, (first, *_) = federation
    other, (stranger, *_) = enrolled(tmp_path / "other")
    assert "error" in shake(first, stranger)
    with pytest.raises(InputError, match="signed by another key"):
        first.accept(other.file.read_bytes())
    with pytest.raises(InputError, match="already has an organiser"):
        first.pin(other.file.read_bytes(), "the file")
    with pytest.raises(InputError, match="belongs to federation tumours; name another --folder"):
        first.request("lungs", "aachen", None)


def test_clocks_may_differ_by_minutes(federation):
    _, (first, second, *_) = federation
    key = certificates.read_key(second.key)
    fast = shown_by(second, key, "tumours", 1, LIFETIME, now() + SKEW - timedelta(minutes=1))
    assert first.peer(shake(first, second, fast)["client"]).node == 1


def test_an_older_an_ended_and_a_second_file_are_refused(federation, monkeypatch):
    organiser, (first, *_) = federation
    old = organiser.file.read_bytes()
    assert not first.accept(old)
    organiser.extend(60)
    new = organiser.file.read_bytes()
    assert first.accept(new)
    with pytest.raises(InputError, match="has serial 2, but 3 was seen here; ask for the newest file"):
        first.accept(old)
    first.file.write_bytes(old)                                         # restored by hand
    with pytest.raises(InputError, match="has serial 2, but 3 was seen here"):
        first.federation()
    first.file.write_bytes(new)
    first.newest.unlink()                                               # stopped between the two writes
    assert first.federation().serial == 3
    key = certificates.read_key(organiser.key)
    fork = federation_file.written(replace(first.federation(), ends=first.federation().ends + timedelta(1)), key)
    with pytest.raises(InputError, match="differs from another file with serial 3"):
        first.accept(fork)
    endless = federation_file.written(replace(first.federation(), serial=4, ends=certificates.FOREVER), key)
    federation_file.read(endless, key.public_key(), "it").check_dates("it")
    for minutes, ended in ((5, False), (15, True)):
        late = first.federation().ends + timedelta(minutes=minutes)
        with monkeypatch.context() as patch:
            patch.setattr(federation_file, "now", lambda late=late: late)
            if ended:
                with pytest.raises(InputError, match="ask the organiser for a newer one"):
                    first.federation()
            else:
                assert first.federation().serial == 3


def test_every_changed_byte_of_a_signed_file_is_noticed(whole):
    organiser, _ = whole
    text = organiser.file.read_bytes()
    key = certificates.read_key(organiser.key).public_key()
    assert federation_file.read(text, key, "it").name == "tumours"
    for at in range(len(text)):
        with pytest.raises(InputError, match=r"was changed|is not a signed"):
            federation_file.read(text[:at] + bytes([text[at] ^ 1 + at % 255]) + text[at + 1 :], key, "it")
    for wrong in (text[:-1], text + b" ", text[1:], b"", text.replace(b"\n", b"\r\n")):
        with pytest.raises(InputError, match=r"was changed|is not a signed"):
            federation_file.read(wrong, key, "it")


def test_a_request_is_no_federation_file(whole, tmp_path):
    _, (first, *_) = whole
    text = (first.path / "request-aachen.json").read_bytes()
    with pytest.raises(InputError, match="was changed, or signed by another key"):
        federation_file.read(text, certificates.read_key(first.key).public_key(), "it")
    with pytest.raises(InputError, match="was changed, or signed by another key"):
        federation_file.read_request(text.replace(b"aachen.example", b"mallory.exampl"), "it")


@pytest.mark.parametrize(("wrong", "why"), [
    ({"fingerprint": "0" * 64}, "has a fingerprint that is not its root certificate's"),
    ({"fingerprint": "0" * 64, "root": b""}, "is not the root certificate of a site"),
    ({"node": 1}, "two sites with the same node"),
    ({"name": "basel"}, "two sites with the same name"),
])
def test_even_the_organiser_cannot_sign_nonsense(whole, wrong, why):
    organiser, _ = whole
    first, *others = organiser.read().sites
    changed, key = partial(replace, organiser.read(), sites=(replace(first, **wrong), *others)), organiser.key
    with pytest.raises(InputError, match=why):
        federation_file.written(changed(), certificates.read_key(key))


def test_a_root_is_signed_by_its_own_key(federation):
    _, (first, *_) = federation
    first.renew()
    root = first.root.read_bytes()
    certificates.key_of_root(root, "it")
    for forged in (root[:-1] + bytes([root[-1] ^ 1]), b"", root[:-1], der_of(first.certificate.read_bytes())):
        with pytest.raises(InputError, match="it is not the root certificate of a site"):
            certificates.key_of_root(forged, "it")


def in_base64(raw):
    return base64.b64encode(raw).decode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary().map(in_base64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_signed_content_whatsoever_gets_a_stack_trace(whole, data):
    organiser, _ = whole
    key = certificates.read_key(organiser.key)
    real = json.loads(organiser.file.read_bytes())
    entry = dict(data.draw(st.sampled_from(real["sites"])))
    document = {name: real[name] for name in real if name != "signature"} | {"sites": [entry]}
    changed = entry if data.draw(st.booleans()) else document
    changed[data.draw(st.sampled_from([*sorted(changed), "more"]))] = data.draw(JSON)
    for kind, read in (("federation", lambda text: federation_file.read(text, key.public_key(), "it")),
                       ("request", lambda text: federation_file.read_request(text, "it"))):
        for wrong in (document, entry):
            text = certificates.sign(kind, json.loads(json.dumps(wrong)), key)
            with contextlib.suppress(InputError):
                read(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_bytes_whatsoever_get_a_stack_trace(whole, raw, inside):
    _, (first, *_) = whole
    framed = b"{\n" + inside + b',\n "signature": "' + b"0" * 128 + b'"\n}\n'
    for text in (raw, framed):
        readers = (first.accept, first.peer, partial(federation_file.read_request, where="it"))
        for read in (*readers, partial(federation_file.organiser_of, where="it")):
            with pytest.raises(InputError):
                read(text)


def test_a_huge_or_deep_file_is_refused_at_once(whole, tmp_path):
    _, (first, *_) = whole
    frame = b',\n "signature": "' + b"0" * 128 + b'"\n}\n'
    with pytest.raises(InputError, match="bytes; a signed file has at most"):
        first.accept(b" " * (certificates.MOST_BYTES + 1))
    with pytest.raises(InputError, match="is not a signed JSON text"):
        federation_file.read_request(b'{\n "a": ' + b"[" * 1_000_000 + frame, "it")
    with pytest.raises(InputError, match="is not a signed JSON text"):
        federation_file.read_request(b'{\n "a": ' + b"9" * 1_000_000 + frame, "it")
    big = tmp_path / "big"
    with open(big, "wb") as hole:
        hole.truncate(2**40)
    assert len(certificates.read_text(big)) == certificates.MOST_BYTES + 1


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_keys_are_for_their_owner_alone_and_never_overwritten(federation):
    organiser, (first, second, *_) = federation
    first.client_context()
    for path, use in ((first.key, first.renew), (first.key, first.client_context),
                      (first.certificate, first.client_context), (organiser.key, organiser.read)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o640)
        with pytest.raises(InputError, match=rf"has mode 640, so others can use this key; run `chmod 600 {path}`"):
            use()
        path.chmod(0o600)
    before = first.key.read_bytes()
    first.request("tumours", "aachen", "elsewhere.example:1")
    assert first.key.read_bytes() == before
    with pytest.raises(InputError, match="exists and is never overwritten"):
        certificates.new_key(first.key)
    with pytest.raises(InputError, match="exists; name another folder"):
        organiser.new("tumours", "ring:4", 1)
    second.key.write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    with pytest.raises(InputError, match="is not an Ed25519 key in PEM"):
        second.renew()


def test_who_listens_is_the_lower_number_that_can_be_reached(tmp_path):
    found = enrolled(tmp_path, only_dials=("aachen", "cork"))[0].read()
    assert [found.listener(i, j) for i, j in ((0, 1), (1, 2), (2, 3), (0, 3))] == [1, 1, 3, 3]
    with pytest.raises(InputError, match=r"aachen .node 0. and cork .node 2. are neighbours and neither can"):
        found.listener(0, 2)
    with pytest.raises(InputError, match="neither can be reached; give one of them an address, or another node number"):
        enrolled(tmp_path / "b", only_dials=("aachen", "basel"))


def test_a_relay_is_a_member_of_the_files_only_where_there_is_one(federation):
    organiser, (_, second, _, last) = federation
    assert "relays" not in organiser.file.read_text()
    assert "relays" not in (second.path / "request-basel.json").read_text()
    path, asked = second.request("tumours", "basel", "basel.example:7443", relays=True)
    assert federation_file.read_request(path.read_bytes(), "the request") == asked
    organiser.approve([asked], 4, RING)
    assert organiser.file.read_text().count("relays") == 1
    last.accept(organiser.file.read_bytes())
    assert [site.name for site in last.federation().sites if site.relays] == ["basel"]
    organiser.approve([second.request("tumours", "basel", "basel.example:7443")[1]], 4, RING)
    assert "relays" not in organiser.file.read_text()


def test_the_organiser_gives_out_numbers(federation, tmp_path):
    organiser, (first, *_) = federation
    newcomer = SiteFolder(tmp_path / "newcomer")
    _, asked = newcomer.request("tumours", "essen", "essen.example:7443")
    with pytest.raises(InputError, match="ring:4 has 4 nodes, and all are taken"):
        organiser.approve([asked], 4, RING)
    organiser.revoke("2")
    with pytest.raises(InputError, match="node 1 is taken by basel; free: 2"):
        organiser.approve([asked], 4, RING, 1)
    with pytest.raises(InputError, match="another site has the name basel"):
        organiser.approve([replace(asked, name="basel")], 4, RING)
    with pytest.raises(InputError, match="asks for federation lungs, this is tumours"):
        organiser.approve([replace(asked, federation="lungs")], 4, RING)
    assert organiser.approve([asked], 4, RING).site("essen").node == 2
    _, moved = first.request("tumours", "aachen", "[2001:db8::7]:7443")
    assert organiser.approve([moved], 4, RING).site(0).address == "[2001:db8::7]:7443"
    assert organiser.read().serial == 5
    with pytest.raises(InputError, match="unknown site 'esen'; did you mean 'essen'"):
        organiser.revoke("esen")


def test_extending_never_shortens(federation):
    organiser, _ = federation
    before = organiser.read()
    with pytest.raises(InputError, match=rf"20 days from now, but federation tumours ends {before.ends:%Y-%m-%d}, "
                       r"which is later; name 30 days or more"):
        organiser.extend(20)
    assert organiser.read() == before
    assert organiser.extend(31).ends > before.ends


@pytest.mark.parametrize("name", ["", "Aachen", "a b", "../x", "x" * 41, "-a", "3", "a/b"])
def test_names_are_safe_in_files_and_addresses(tmp_path, name):
    with pytest.raises(InputError, match="use at most 40 lower-case letters"):
        SiteFolder(tmp_path).request("tumours", name, None)


@pytest.mark.parametrize("address", ["host", "host:", ":7443", "host:0", "host:70000", "::1:7443", "a b:1", "h\n:1"])
def test_a_wrong_address_is_refused(tmp_path, address):
    with pytest.raises(InputError, match="write HOST:PORT, as in"):
        SiteFolder(tmp_path).request("tumours", "aachen", address)


FORM = f"""wrote site/request-aachen.json
Your fingerprint, for the organiser to compare by telephone:
    {" ".join("#" * 8)}
    {" ".join("#" * 8)}
Send site/request-aachen.json to the organiser.
"""


def test_the_ten_commands_of_the_guide_enrol_four_hospitals(monkeypatch, capsys, tmp_path):
    guide = (Path(__file__).parents[2] / "docs/how-to/federation.md").read_text()
    commands = re.findall(r"^qg (.*?) +# at (?:the )?(\w+)$", guide, re.MULTILINE)
    assert len(commands) == 10
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    said = {}
    for words, where in commands:
        place = tmp_path / where
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        if words.startswith("federation approve"):
            for sent in tmp_path.glob("*/site/request-*.json"):
                shutil.copy(sent, place)
        if words.startswith("site install"):
            shutil.copy(tmp_path / "organiser/federation/federation.json", place)
        status, out, err = inside(monkeypatch, capsys, *words.split())
        assert (status, err) == (0, ""), words
        assert max(map(len, out.splitlines())) <= 80
        said[words.split()[1], where] = out
    assert len(asked) == 8                                  # one for each request, one at each site
    organisers = {one.splitlines()[1] for (word, _), one in said.items() if word == "install"}
    assert organisers == {said["new", "organiser"].splitlines()[3]}             # both read out the same
    (shown,) = re.findall(r"^```text\n(.*?)```", guide, re.MULTILINE | re.DOTALL)
    assert [re.sub("[0-9a-f]{4}", "#", one) for one in (shown, said["request", "aachen"])] == [FORM, FORM]
    assert said["request", "cork"].splitlines()[2] in said["approve", "organiser"]
    sites = [SiteFolder(tmp_path / name / "site") for name in NAMES]
    assert [site.own().node for site in sites] == [0, 1, 2, 3]
    assert sites[0].peer(shake(sites[0], sites[3])["client"]).node == 3
    for site in sites:                                      # no key is in what is sent
        raw = certificates.read_key(site.key).private_bytes_raw()
        sent = [path.read_bytes() for path in (*site.path.glob("request-*.json"), site.file)]
        assert len(sent) == 2
        for form in (raw, raw.hex().encode(), base64.b64encode(raw)[:40], site.key.read_bytes().splitlines()[1]):
            assert not any(form in text for text in sent)


@pytest.mark.parametrize(("words", "says"), [
    (("federation", "aprove"), "unknown command of qg federation 'aprove'; did you mean 'approve'?"),
    (("federation", "new", "Lungs", "--topology", "ring:4"), "use at most 40 lower-case letters"),
    (("federation", "new", "lungs", "--topology", "ring:2"), "ring needs n >= 3"),
    (("federation", "new", "lungs", "--topology", "ring:4", "--days", "nan"), "lasts at most 3660 days, got nan"),
    (("federation", "show"), "federation has no federation; make one with `qg federation new`"),
    (("federation", "approve"), "name the requests to approve"),
    (("federation", "approve", "nothing.json"), "cannot read nothing.json: No such file or directory"),
    (("site", "install", "nothing.json"), "cannot read nothing.json: No such file or directory"),
    (("site", "renew"), "site/federation.json does not exist; run `qg site install` with the organiser's file"),
    (("site", "renew", "--days", "90"), "valid for at most 31 days"),
    (("site", "show"), "site/federation.json does not exist"),
    (("site", "request", "--federation", "lungs", "--name", "a", "--address", "b"), "write HOST:PORT, as in"),
    (("site", "request", "--federation", "lungs", "--name", "a", "--relay"), "dial a relay; give its --address"),
    (("node", "e.toml", "--data", "d", "--site", "s", "--bandwidth", "50"), "number with kbit, mbit or gbit"),
    (("node", "e.toml", "--data", "d", "--site", "s", "--proxy", "p:1"), "proxy must be http://HOST:PORT"),
    (("node", "e.toml", "--data", "d", "--proxy", "http://p:1"), "are for the sites of a federation; name a site's"),
])  # fmt: skip
def test_a_wrong_command_is_one_sentence(monkeypatch, capsys, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    status, _, err = inside(monkeypatch, capsys, *words)
    assert status == 2
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["federation", "site"])
def test_both_sides_list_and_explain_their_commands(monkeypatch, capsys, name):
    status, out, _ = inside(monkeypatch, capsys, name)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    for command in SUBCOMMANDS[name]:
        assert f"\n  {command} " in out
        status, about, _ = inside(monkeypatch, capsys, name, command, "--help")
        assert status == 0
        assert f"usage: qg {name} {command} " in about


def test_each_request_is_asked_for_by_itself(monkeypatch, capsys, tmp_path):
    organiser, asked = OrganiserFolder(tmp_path / "organiser"), []
    organiser.new("tumours", "ring:4", 30)
    requests = {name: SiteFolder(tmp_path / name).request("tumours", name, f"{name}.example:1") for name in NAMES}
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)

    def approved(answer):
        asked.clear()
        monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer(question))
        paths = [str(path) for path, _ in requests.values()]
        return inside(monkeypatch, capsys, "federation", "approve", *paths, "--folder", str(organiser.path))

    status, out, err = approved(lambda question: "n" if "cork" in question else "y")
    assert status == 2
    assert "cork was not approved, so nothing was changed; compare its fingerprint by telephone, or leave out" in err
    assert organiser.read().sites == ()
    assert len(asked) == 3

    def end(question):
        raise EOFError

    assert approved(end)[0] == 2
    assert organiser.read().sites == ()
    status, out, _ = approved(lambda question: "y")
    assert status == 0
    for number, (name, (_, request)) in enumerate(requests.items()):
        assert asked[number] == f"Did {name} read this fingerprint to you, by telephone? Make it node {number}? [y/N] "
        assert certificates.spoken(request.fingerprint).splitlines()[0] in out
    assert [site.name for site in organiser.read().sites] == [*NAMES]


def test_nothing_is_approved_or_trusted_without_a_comparison(monkeypatch, capsys, federation, tmp_path):
    organiser, (first, *_) = federation
    path = str(first.path / "request-aachen.json")
    status, _, err = inside(monkeypatch, capsys, "federation", "approve", path, "--folder", str(organiser.path))
    assert (status, err) == (2, "qg: compare the fingerprint by telephone, then run the command again with --yes\n")
    newcomer = SiteFolder(tmp_path / "newcomer")
    newcomer.request("tumours", "essen", None)
    status, _, err = inside(
        monkeypatch, capsys, "site", "install", str(organiser.file), "--folder", str(newcomer.path), "--yes"
    )
    assert status == 2
    assert "not approved yet, or revoked; ask the organiser" in err
    assert not newcomer.is_pinned
