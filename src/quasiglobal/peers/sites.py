"""Edges between the sites of a federation: one side dials, the other listens, over mutual TLS 1.3.

The federation file, which the organiser signs, replaces the store: it says who takes part, where each site listens, and
by which key it is known. A site that has a newer file passes it on to its neighbours.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from random import uniform

from quasiglobal.errors import InputError
from quasiglobal.peers.audit import Audit
from quasiglobal.peers.channel import Lost, Refused
from quasiglobal.peers.connections import Connections, Link
from quasiglobal.peers.edge import Edge
from quasiglobal.peers.federation_file import Federation, split_address
from quasiglobal.peers.greeting import PROTOCOL, Greeting, exchange, refuse
from quasiglobal.peers.listener import Guest, Listener, resolved
from quasiglobal.peers.opening import ADMISSION, Opener, Terms
from quasiglobal.peers.site import Identity, SiteFolder
from quasiglobal.peers.tls import TLSChannel, close_gently, prepare, reason, trouble

log = logging.getLogger("quasiglobal")

WATCH = 5.0
"""Seconds between looks at the federation file and the certificates."""

LONGEST_PAUSE = 5.0
"""Maximum seconds between two attempts to dial."""

LOOK_UP = 30.0
"""Seconds for a name to be found, in addition: a machine with a dead name server takes 5 to 10 s for each look-up."""

FAREWELL = 1.0
"""Seconds for a refused connection to read why."""


class SiteOpener(Opener):
    """Opens the edges of one site; the folder has its key, its certificate and the federation file.

    `listen` is this machine's own HOST:PORT where it differs from the address in the file, as behind NAT.
    """

    def __init__(self, folder: SiteFolder, listen: str | None = None, audit: Audit | None = None) -> None:
        self._folder, self._listen, self.audit = folder, listen, audit or Audit(None)
        self.federation = folder.federation()
        self.site = folder.own(self.federation)
        folder.client_context()                             # raises now if the key or the certificate is of no use
        self._session = secrets.token_hex(8)
        self._news = threading.Condition()
        self._links = Connections()
        self._parked: dict[int, Link] = {}
        self._dialling: dict[int, Guest] = {}
        self._pauses: dict[int, float] = {}
        self._versions: dict[int, str] = {}
        self._refusals: dict[int, str] = {}
        """Why the last connection of a neighbour that dials was refused."""
        self._closing = threading.Event()
        self._listener: Listener | None = None

    # -------------------------------------------------------------------------------------------- the opener

    def begin(self, terms: Terms) -> None:
        """Listen, if a neighbour dials, and watch the federation file."""
        self._terms = terms
        if terms.rank != self.site.node:
            raise InputError(f"{self._folder.path} is node {self.site.node}, not {terms.rank}")
        expected = [there for there in terms.neighbours if self.expects(there)]
        for there in set(terms.neighbours) - set(expected):
            log.warning("node %d is not in the federation file: its weight stays here", there)
        if any(self._listens_for(there) for there in expected):
            host, port = split_address(self._listen or self.site.address or "")
            self._listener = Listener(host, port, self._receive)
        log.info("%s", self._in_words(expected))
        self.audit.record(
            "started", federation=self.federation.name, serial=self.federation.serial, node=self.site.node,
            neighbours=expected, step=terms.step(),
        )
        threading.Thread(target=self._watch, name="federation", daemon=True).start()

    def expects(self, there: int) -> bool:
        """Whether the federation file has this neighbour."""
        return any(site.node == there for site in self.federation.sites)

    def called(self, there: int) -> str:
        """A neighbour in words: its number, its name, and who dials."""
        site = self.federation.site(there)
        return f"{there} ({site.name}, {'dials' if self._listens_for(there) else f'at {site.address}'})"

    def open(self, there: int, seconds: float) -> Edge:
        """Dial a neighbour, or wait until it dials."""
        if not self.expects(there):
            self._closing.wait(seconds)
            raise Lost("it is not in the federation file")
        deadline = time.monotonic() + seconds
        return (self._awaited if self._listens_for(there) else self._dialled)(there, deadline).edge

    def stop(self) -> None:
        """Stop listening, dialling and watching."""
        self._closing.set()
        for guest in list(self._dialling.values()):
            guest.dismiss()
        if self._listener is not None:
            self._listener.close()
        with self._news:
            self._news.notify_all()
            parked = list(self._parked.values())
        for link in parked:
            link.edge.cut("this process ends")

    def close(self) -> None:
        """Record the traffic of the connections, after they are closed."""
        self._record_closed(1.0)

    def _listens_for(self, there: int) -> bool:
        return self.federation.listener(self.site.node, there) == self.site.node

    def _in_words(self, expected: list[int]) -> str:
        """The opening line of the log."""
        others = [self.called(there) for there in expected]
        at = f", listening at port {self._listener.port}" if self._listener else ""
        return (
            f"node {self.site.node} ({self.site.name}) of federation {self.federation.name}, file "
            f"{self.federation.serial}{at}; neighbours over TLS 1.3: {', '.join(others) or 'none'}"
        )

    # -------------------------------------------------------------------------------------------- dial

    def _dialled(self, there: int, deadline: float) -> Link:
        """Dial once, after a pause that doubles with each failure."""
        pause = self._pauses.get(there, 0.0)
        self._closing.wait(min(uniform(0.5, 1.0) * pause, deadline - time.monotonic()))
        self._pauses[there] = min(max(2 * pause, 0.1), LONGEST_PAUSE)
        link = self._dial(there, max(deadline, time.monotonic() + ADMISSION))
        del self._pauses[there]
        return link

    def _dial(self, there: int, deadline: float, renews: Link | None = None) -> Link:
        try:
            address = self.federation.site(there).address or ""
            guest, deadline = self._connected(there, address, deadline)
        except (InputError, OSError) as error:
            raise Lost(reason(error)) from None
        try:
            return self._admitted(guest, deadline, there, renews)
        except Refused as error:
            self.audit.refuse(f"node {there} ({address})", str(error), logged=False)
            close_gently(guest.connection, FAREWELL)
            raise
        except Lost:
            guest.connection.close()
            raise
        finally:
            self._dialling.pop(there, None)

    def _connected(self, there: int, address: str, deadline: float) -> tuple[Guest, float]:
        """A TCP connection, to each address that the name has in turn, and the deadline without the look-up."""
        failed, began = OSError("it has no address"), time.monotonic()
        found = resolved(*split_address(address), LOOK_UP, self._closing)
        deadline += time.monotonic() - began
        for k, (family, kind, protocol, _, place) in enumerate(found):
            self._dialling[there] = guest = Guest(socket.socket(family, kind, protocol), address)
            try:
                if self._closing.is_set():
                    raise TimeoutError
                guest.connection.settimeout(max((deadline - time.monotonic()) / (len(found) - k), 0.001))
                guest.connection.connect(place)
                return guest, deadline
            except OSError as error:
                failed = error
                guest.connection.close()
        raise failed

    # -------------------------------------------------------------------------------------------- listen

    def _awaited(self, there: int, deadline: float) -> Link:
        """Wait for a neighbour that dials."""
        with self._news:
            while not self._closing.is_set():
                link = self._parked.pop(there, None)
                if link is not None and link.alive:
                    return link
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(left)
        raise Lost(self._refusals.get(there, "it did not connect in time"))

    def _receive(self, guest: Guest) -> None:
        """Authenticate a connection; park it for `open`, or refuse it with the reason."""
        try:
            link = self._admitted(guest, time.monotonic() + ADMISSION)
        except Lost as error:
            self.audit.refuse(guest.who, str(error))
            if guest.node is not None:
                self._refusals[guest.node] = str(error)
            close_gently(guest.connection, FAREWELL)
            return
        if not link.greeting.renews:
            with self._news:
                self._parked[link.identity.node] = link
                self._news.notify_all()
            if self._closing.is_set():
                link.edge.cut("this process ends")

    # -------------------------------------------------------------------------------------------- both

    def _admitted(self, guest: Guest, deadline: float, there: int | None = None, renews: Link | None = None) -> Link:
        """Handshake, identity and greeting of a connection, dialled to `there` or accepted."""
        dials, federation = there is not None, self.federation
        try:
            prepare(guest.connection, 2 * self._terms.timeout)
            context = self._folder.client_context() if dials else self._folder.server_context()
            own = self._folder.shown()                      # after the context, which may renew it
            guest.connection = connection = context.wrap_socket(
                guest.connection, server_side=not dials, do_handshake_on_connect=False
            )
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.do_handshake()
        except InputError as error:
            raise Refused(f"this site cannot connect: {error}") from None
        except (OSError, ValueError) as error:
            raise trouble(error) from None
        try:
            certificate = connection.getpeercert(binary_form=True) or b""
            identity = self._identified(certificate, federation, there)
        except InputError as error:
            refuse(connection, str(error), deadline)
            raise Refused(str(error)) from None
        guest.node, guest.who = identity.node, f"node {identity.node} ({guest.address})"
        mine = Greeting(
            PROTOCOL, _version(), self._terms.experiment, self._terms.topology, self.site.node, self._terms.step(),
            federation.serial, self._session, int(renews is not None),
        )
        theirs = exchange(connection, mine, deadline, lambda theirs: self._objection(theirs, identity, mine, dials))
        self._note_version(theirs)
        channel = TLSChannel(connection)
        old = renews or (self._links.to(identity.node) if theirs.renews else None)
        if old is not None:
            old.edge.adopt(channel)
        edge = old.edge if old is not None else self._edge(identity.node, channel, theirs)
        link = Link(
            edge, channel, identity, theirs, dials, datetime.now(UTC),
            min(identity.ends, own.ends) if own else identity.ends, theirs.serial,
        )
        self.audit.record(
            "renewed" if old is not None else "connected", node=identity.node, address=guest.address,
            certificate=hashlib.sha256(certificate).hexdigest(), key=identity.fingerprint,
            until=identity.ends.isoformat(), step=theirs.step, library=theirs.library, serial=theirs.serial,
        )
        self._links.take(link)
        return link

    def _identified(self, certificate: bytes, federation: Federation, there: int | None) -> Identity:
        """The site that a certificate proves, if it is the neighbour that it should be."""
        identity = self._folder.peer(certificate, federation)
        if there is not None and identity.node != there:
            raise InputError(f"the certificate is node {identity.node}'s, and node {there} was dialled")
        if identity.node not in self._terms.neighbours:
            raise InputError(f"node {identity.node} is not a neighbour of node {self.site.node} in this topology")
        return identity

    def _objection(self, theirs: Greeting, identity: Identity, mine: Greeting, dials: bool) -> str:
        """A reason to refuse a neighbour whose greeting fits."""
        if theirs.node != identity.node:
            return f"it says that it is node {theirs.node}, and its certificate says {identity.node}"
        link = self._links.to(identity.node)
        same = link is not None and link.greeting.session == theirs.session
        if theirs.renews and (dials or not same):
            return "there is no connection to renew"
        if link is not None and not same and not dials:
            return f"node {identity.node} is taken: another process with its certificate is connected"
        return ""

    def _edge(self, there: int, channel: TLSChannel, theirs: Greeting) -> Edge:
        edge = Edge(self.site.node, there, channel, generation=0)
        edge.step_there = theirs.step
        edge.on_note = lambda note: self._heard_of(there, note)
        return edge

    def _note_version(self, theirs: Greeting) -> None:
        if theirs.library != _version() and self._versions.get(theirs.node) != theirs.library:
            self._versions[theirs.node] = theirs.library
            log.warning("node %d has quasiglobal %s, this node %s", theirs.node, theirs.library, _version())

    # -------------------------------------------------------------------------------------------- newer files

    def _watch(self) -> None:
        """Follow the federation file, pass it on, renew connections before their certificates end, and record ends."""
        while not self._closing.wait(WATCH):
            for task in (self._follow_file, self._pass_on, self._renew, self._record_closed):
                try:
                    task()
                except (InputError, Lost, OSError) as error:
                    self.audit.refuse("federation", str(error))

    def _heard_of(self, there: int, note: bytes) -> None:
        """A neighbour passes on a federation file."""
        try:
            if self._folder.accept(note, f"the federation file from node {there}"):
                self._follow_file()
        except (InputError, OSError) as error:
            self.audit.refuse(f"a file from node {there}", str(error))

    def _follow_file(self) -> None:
        """Use a newer file: close the connections to sites that it does not have, or with another key."""
        try:
            newer = self._folder.federation()
            if newer.serial == self.federation.serial:
                return
            own = self._folder.own(newer)
            if own.node != self.site.node:
                raise InputError(f"this site is node {own.node} in the new federation file; start it again")
        except InputError as error:
            for link in self._links.open():
                link.edge.cut(str(error))
            raise
        self.federation = newer
        log.warning("federation %s: file %d, of %d sites", newer.name, newer.serial, len(newer.sites))
        self.audit.record("federation", serial=newer.serial, sites=[site.name for site in newer.sites])
        keys = {site.node: site.fingerprint for site in newer.sites}
        for link in self._links.open():
            who = link.identity
            if keys.get(who.node) != who.fingerprint:
                self.audit.record("revoked", node=who.node, key=who.fingerprint, serial=newer.serial)
                link.edge.cut(f"revoked by federation file {newer.serial}")

    def _pass_on(self) -> None:
        serial = self.federation.serial
        for link in self._links.open():
            if link.serial < serial and link.edge.listening:
                link.edge.send_note(self._folder.text())
                link.serial = serial

    def _renew(self) -> None:
        """Replace dialled connections before a certificate ends; cut those whose certificate has ended."""
        for link in self._links.open():
            if link.has_ended:
                link.edge.cut("a certificate ended")
            elif link.dialled and link.edge.listening and link.is_due:
                self._dial(link.identity.node, time.monotonic() + ADMISSION, renews=link)

    def _record_closed(self, seconds: float = 0.0) -> None:
        """Record the bytes of the connections that are closed."""
        for link in self._links.take_ended(seconds):
            self.audit.record(
                "closed", node=link.identity.node, sent=link.channel.sent, received=link.channel.received,
                step=self._terms.step(),
            )


def _version() -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("quasiglobal")
    return "unknown"
