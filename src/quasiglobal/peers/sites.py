"""Edges between the sites of a federation: one side dials, the other listens, over mutual TLS 1.3.

The federation file, which the organiser signs, replaces the store: it lists the sites with their addresses and keys.
A site that has a newer file passes it on to its neighbours. Strangers may connect to the `Listener`, so the number of
unauthenticated connections is bounded. An `Audit` records connections for a site's IT department.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import itertools
import logging
import secrets
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from random import uniform

from quasiglobal.common.files import Json
from quasiglobal.errors import InputError
from quasiglobal.peers import relay
from quasiglobal.peers.audit import append
from quasiglobal.peers.bandwidth import Cap
from quasiglobal.peers.certificates import OutOfDate
from quasiglobal.peers.dialling import Proxy, Unresolved, connected
from quasiglobal.peers.edge import Edge, Lost, Refused
from quasiglobal.peers.federation_file import Federation, Site, split_address
from quasiglobal.peers.folders import Identity, SiteFolder
from quasiglobal.peers.greeting import PROTOCOL, Greeting, accept, ask_to_meet, asked_to_meet, exchange, refuse
from quasiglobal.peers.membership import ADMISSION, LONG, Opener, Terms
from quasiglobal.peers.reports import STRANGERS, Reports
from quasiglobal.peers.tls import TLSChannel, close_gently, prepare, reason, trouble

if sys.platform != "win32":
    import resource

log = logging.getLogger("quasiglobal")

WATCH = 5.0
"""Seconds between looks at the federation file and the certificates, and between two renewals by one neighbour."""

TRAFFIC = 60.0
"""Seconds between records of the bytes so far."""

LONGEST_PAUSE = 5.0
"""Maximum seconds between two attempts to dial."""

NEXT = 1.0
"""Seconds after a connection through a relay until the next one is accepted."""

FAREWELL = 1.0
"""Seconds for the other side of a refused connection to read the reason."""

MOST_WAITING = 64
"""Maximum number of connections that are not yet authenticated."""

FILES_EACH = 8
"""Open files reserved per unauthenticated connection, with room for the other files of the process."""


class SiteOpener(Opener):
    """Opens the edges of one site; the folder has its key, its certificate and the federation file.

    `listen` is the HOST:PORT to listen at if it differs from the address in the file, as behind NAT. `facts` are
    further entries of the records of the start and the end, such as the fingerprint of the data. `proxy` dials the
    neighbours, and `cap` limits what this site sends.
    """

    def __init__(
        self,
        folder: SiteFolder,
        listen: str | None = None,
        audit: Audit | None = None,
        facts: Mapping[str, object] | None = None,
        proxy: Proxy | None = None,
        cap: Cap | None = None,
    ) -> None:
        super().__init__()
        self._folder, self._listen, self.audit, self._facts = folder, listen, audit or Audit(None), dict(facts or {})
        self._proxy, self._cap = proxy, cap or Cap()
        self.federation = folder.federation()
        self._names = {site.node: site.called for site in self.federation.sites}
        self.site = folder.own(self.federation)
        folder.client_context()                             # raises early if the key or the certificate is unusable
        self._session = secrets.token_hex(8)
        self._news = threading.Condition()
        self._links = Connections()
        self._taking = threading.Lock()
        self._moved: list[Json] = []
        """The last record of the traffic."""
        self._parked: dict[int, Link] = {}
        self._dialling: dict[int, Guest] = {}
        """The connection that each thread dials: one may renew an edge while another opens it again."""
        self._pauses: dict[int, float] = {}
        self._turns: dict[int, int] = {}
        """Number of attempts to meet each neighbour at a relay: each attempt is at another one."""
        self._refusals: dict[int, str] = {}
        """Reason why the last connection of each dialling neighbour was refused."""
        self._closing = threading.Event()
        self._listener: Listener | None = None
        self._relay: relay.Relay | None = None

    # -------------------------------------------------------------------------------------------- the opener

    def begin(self, terms: Terms) -> None:
        """Listen, if a neighbour dials, and watch the federation file."""
        self._terms = terms
        if terms.rank != self.site.node:
            raise InputError(f"{self._folder.path} is node {self.site.node}, not {terms.rank}")
        expected = [there for there in terms.neighbours if self.expects(there)]
        for there in set(terms.neighbours) - set(expected):
            log.warning("%s is not in the federation file: its weight stays here", self.called(there))
        if self.site.relays:
            self._relay = relay.Relay(self.audit.record_about, self._cap, most_waiting())
        if self._relay or any(self._listens_for(there) and not self._relays_to(there) for there in expected):
            host, port = split_address(self._listen or self.site.address or "")
            self._listener = Listener(host, port, self._receive, self.report)
        at = f", listening at port {self._listener.port}" if self._listener else ""
        log.info(
            "%s of federation %s, file %d%s; neighbours over TLS 1.3: %s",
            self.site.called, self.federation.name, self.federation.serial, at,
            ", ".join(map(self._whereabouts, expected)) or "none",
        )
        self._facts |= {
            "node": self.site.node, "site": self.site.name, "key": self.site.fingerprint, "version": _version(),
            "federation": self.federation.name, "experiment": terms.experiment, "topology": terms.topology,
        }
        self.audit.record(
            "started", **self._facts, serial=self.federation.serial, neighbours=expected, step=terms.step(),
        )
        threading.Thread(target=self._watch, name="federation", daemon=True).start()
        if self.site.address is None:
            for there in terms.neighbours:
                threading.Thread(target=self._listen_at_relay, args=(there,), name="at relay", daemon=True).start()

    def expects(self, there: int) -> bool:
        """Whether the federation file has this neighbour."""
        return any(site.node == there for site in self.federation.sites)

    def called(self, there: int) -> str:
        """The number and the name of a node; it keeps its name when a newer file does not have it."""
        return self._names.get(there, f"node {there}")

    def _whereabouts(self, there: int) -> str:
        how = "dials" if self._listens_for(there) else self.federation.site(there).address or "cannot be reached"
        if relays := self._relays_to(there):
            how = f"through {' or '.join(one.name for one in relays)}"
        return f"{self.called(there)}, {how}"

    def open(self, there: int, seconds: float) -> Edge:
        """Dial a neighbour, or wait until it dials."""
        if not self.expects(there):
            self._closing.wait(seconds)
            raise Lost("it is not in the federation file")
        deadline = time.monotonic() + seconds
        return (self._awaited if self._listens_for(there) else self._dialled)(there, deadline).edge

    def relay_on(self, seconds: float, noted: Sequence[int]) -> None:
        """Connect other sites until they have finished, for at most `seconds`, or until a signal to stop is noted."""
        if self._relay is None or not self._relay.busy:
            return
        log.info("this site relays until others have finished, for at most %g s (--linger; Ctrl-C ends this)", seconds)
        deadline = time.monotonic() + seconds
        while self._relay.busy and not noted and time.monotonic() < deadline:
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop listening, dialling and watching."""
        self._closing.set()
        if self._relay is not None:
            self._relay.close()
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
        self.audit.reports.write_rest(0.0)
        super().close()

    def record_end(self, status: str) -> None:
        """Record that this process ends, unless it has recorded no start."""
        if "experiment" in self._facts:
            self._record_traffic()
            self.audit.record("finished", **self._facts, status=status, step=self._terms.step())

    def _listens_for(self, there: int) -> bool:
        with suppress(InputError):                          # neither can be reached, since a relay was revoked
            return self.federation.listener(self.site.node, there) == self.site.node
        return False

    def _relays_to(self, there: int) -> list[Site]:
        return self.federation.relays(self.site.node, there)

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
            guest, deadline = self._reached(there, deadline)
            return self._admitted(guest, self._shake(guest, deadline, dials=True), deadline, there, renews)
        except InputError as error:
            raise Lost(str(error)) from None
        except Lost as error:
            self._give_up(there, error)
            raise
        finally:
            self._dialling.pop(threading.get_ident(), None)

    def _reached(self, there: int, deadline: float) -> tuple[Guest, float]:
        """A connection to a site, direct or through a relay, and the deadline extended by the look-up."""
        if self._relays_to(there):
            return self._met(there, max(deadline - time.monotonic(), 0.001))
        site = self.federation.site(there)
        if site.address is None:
            raise Lost("neither it nor this site can be reached, and no site of the federation relays")
        return self._connected(site, deadline)

    def _connected(self, site: Site, deadline: float) -> tuple[Guest, float]:
        def hold(connection: socket.socket) -> None:
            self._dialling[threading.get_ident()] = Guest(connection, address)

        address = site.address or ""
        try:
            _, deadline = connected(address, deadline, self._closing, hold, self._proxy)
            return self._dialling[threading.get_ident()], deadline
        except OSError as error:
            why = f"cannot be reached at {address}: {reason(error)}"
            if not self._closing.is_set():                  # a neighbour that is not started yet is nothing to warn of
                level = logging.WARNING if isinstance(error, Unresolved) else logging.INFO
                self.report(site.called, f"{site.called} {why}; trying again", level)
            raise Lost(f"it {why}") from None

    def _give_up(self, there: int, error: Lost) -> None:
        """Close a connection that was dialled, and record a refusal."""
        guest = self._dialling.get(threading.get_ident())
        if isinstance(error, Refused):
            self.audit.refuse(self._whose(error, there), str(error), guest.address if guest else "")
        if guest is not None and isinstance(error, Refused):
            close_gently(guest.connection, FAREWELL)
        elif guest is not None:
            guest.connection.close()

    def _whose(self, error: Exception, there: int) -> str:
        """The site that a reason is about: the neighbour, or the relay on the way to it."""
        by = error.by if isinstance(error, Refused) else None
        return self.called(there if by is None else by)

    # -------------------------------------------------------------------------------------------- meet at a relay

    def _met(self, there: int, patience: float) -> tuple[Guest, float]:
        """A connection to a site that came to a relay within `patience` seconds, and the deadline to admit it."""
        relays, turn = self._relays_to(there), self._turns.get(there, 0)
        chosen, self._turns[there] = relays[turn % len(relays)], turn + 1
        try:
            guest, deadline = self._connected(chosen, time.monotonic() + ADMISSION)
            connection = self._shake(guest, deadline, dials=True, protocols=[relay.PROTOCOL])
            if self._folder.peer(certificate_of(connection), self.federation).node != chosen.node:
                raise Refused(f"it is another site than node {chosen.node}")
            if connection.selected_alpn_protocol() != relay.PROTOCOL:
                raise Refused("it does not relay; ask it for the newest version and federation file, and a restart")
            ask_to_meet(connection, there, deadline)
            guest.connection = relay.bare(connection)
            guest.connection.settimeout(patience)
            if self._closing.is_set() or guest.connection.recv(1) != relay.MET:
                raise Lost("it closed the connection")
        except TimeoutError:
            raise Lost(f"it did not come to the relay {chosen.name} in time") from None
        except (Refused, InputError) as error:
            raise Refused(f"the relay {chosen.name}: {error}", chosen.node) from None
        except (Lost, OSError) as error:
            raise Lost(f"the relay {chosen.name}: {error if isinstance(error, Lost) else reason(error)}") from None
        guest.relay = chosen.node
        return guest, time.monotonic() + ADMISSION

    def _listen_at_relay(self, there: int) -> None:
        """Accept a neighbour's connections through a relay, one after the other, wherever this site is to listen."""
        pause = 0.0
        while not self._closing.wait(uniform(0.5, 1.0) * pause):
            if not (self.expects(there) and self._relays_to(there) and self._listens_for(there)):
                pause = WATCH
                continue
            try:
                guest, _ = self._met(there, LONG)
                self._receive(guest)
                pause = NEXT                                # a relay may say that somebody came, again and again
            except (InputError, Lost) as error:
                self._refusals[there] = str(error)
                if isinstance(error, Refused | InputError):
                    self.report(self._whose(error, there), f"{self.called(there)} cannot come: {error}")
                self._give_up(there, error if isinstance(error, Lost) else Refused(str(error)))
                pause = min(max(2 * pause, 0.1), LONGEST_PAUSE)
            finally:
                self._dialling.pop(threading.get_ident(), None)

    def _relay_for(self, guest: Guest, connection: ssl.SSLSocket, by: relay.Relay, deadline: float) -> None:
        """Connect a site of the federation with the one that it asks for, if the file says that it is done here."""
        federation = self.federation
        try:
            identity = self._folder.peer(certificate_of(connection), federation)
            guest.node = identity.node
            there = asked_to_meet(connection, deadline)
            if there == identity.node:
                raise InputError(f"node {there} asks for itself")
            if self.site.node not in [site.node for site in federation.relays(identity.node, there)]:
                raise InputError(f"no relay here between node {identity.node} and node {there}: one has an address")
            accept(connection, deadline)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            end = relay.End(relay.bare(connection), identity.node, there, identity.fingerprint, guest.address)
        except InputError as error:
            refuse(connection, str(error), deadline, clock=isinstance(error, OutOfDate))
            raise Refused(str(error)) from None
        except OSError as error:
            raise trouble(error) from None
        by.take(end)
        by.keep(self._may_relay)                            # a newer federation file may have come meanwhile

    def _may_relay(self, end: relay.End) -> bool:
        """Whether the federation file lets this site connect another one with the one that it asks for."""
        of = self.federation
        known = of.has(end.node, end.key) and end.to in [site.node for site in of.sites]
        return known and self.site.node in [site.node for site in of.relays(end.node, end.to)]

    # -------------------------------------------------------------------------------------------- listen

    def _awaited(self, there: int, deadline: float) -> Link:
        """Wait for a neighbour that dials."""
        with self._news:
            while not self._closing.is_set():
                link = self._parked.pop(there, None)
                if link is not None and link.channel.alive:
                    return link
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(left)
        raise Lost(self._refusals.get(there, "it did not connect in time"))

    def _receive(self, guest: Guest) -> None:
        """Authenticate a connection; park it for `open`, or refuse it with the reason."""
        deadline = time.monotonic() + ADMISSION
        try:
            by = self._relay
            connection = self._shake(guest, deadline, dials=False, protocols=[relay.PROTOCOL] if by else [])
            if by is not None and connection.selected_alpn_protocol() == relay.PROTOCOL:
                self._relay_for(guest, connection, by, deadline)
                return
            link = self._admitted(guest, connection, deadline)
        except Lost as error:
            self._refuse(STRANGERS if guest.node is None else self.called(guest.node), str(error), guest.address)
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

    def _shake(self, guest: Guest, deadline: float, dials: bool, protocols: Sequence[str] = ()) -> ssl.SSLSocket:
        """Handshake on a connection, dialled or accepted; `protocols` beside the greeting are named by ALPN."""
        try:
            prepare(guest.connection, 2 * self._terms.timeout)
            context = self._folder.client_context() if dials else self._folder.server_context()
            if protocols:
                context.set_alpn_protocols(protocols)
            guest.connection = connection = context.wrap_socket(
                guest.connection, server_side=not dials, do_handshake_on_connect=False
            )
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.do_handshake()
        except InputError as error:
            raise Refused(f"this site cannot connect: {error}") from None
        except (OSError, ValueError) as error:
            raise trouble(error) from None
        return connection

    def _admitted(
        self,
        guest: Guest,
        connection: ssl.SSLSocket,
        deadline: float,
        there: int | None = None,
        renews: Link | None = None,
    ) -> Link:
        """Identify and greet on a connection after its handshake, dialled to `there` or accepted."""
        dials, federation = there is not None, self.federation
        try:
            own = self._folder.shown()
            certificate = certificate_of(connection)
            identity = self._identified(certificate, federation, there)
        except InputError as error:
            refuse(connection, str(error), deadline, clock=isinstance(error, OutOfDate))
            raise Refused(str(error)) from None
        guest.node = identity.node
        mine = Greeting(
            PROTOCOL, _version(), self._terms.experiment, self._terms.topology, self.site.node, self._terms.step(),
            federation.serial, self._session, int(renews is not None),
        )
        theirs = exchange(connection, mine, deadline, lambda theirs: self._objection(theirs, identity, mine, dials))
        self._note_version(theirs)
        with self._taking:                                  # else a renewal could overtake the one before
            if not self.federation.has(identity.node, identity.fingerprint):
                raise Refused(f"revoked by federation file {self.federation.serial}")
            old = renews or (self._links.to(identity.node) if theirs.renews else None)
            if theirs.renews and old is None:
                raise Lost("the connection to renew has ended")
            channel = TLSChannel(connection, self._cap)
            if old is not None:
                edge = old.edge
                edge.adopt(channel)
            else:
                edge = Edge(self.site.node, identity.node, channel, generation=0)
                edge.step_there, edge.on_note = theirs.step, partial(self._heard_of, identity.node)
            link = Link(
                edge, channel, identity, theirs, dials, datetime.now(UTC),
                min(identity.ends, own.ends) if own else identity.ends, theirs.serial,
            )
            self._links.take(link)
        self._record_closed()                               # no link outlives the next one
        opening: Json = {
            "event": "renewed" if old is not None else "connected", "connection": link.number, "node": identity.node,
            "site": federation.site(identity.node).name, "address": _other_end(guest),
            "dialled": guest.address if dials else None, "certificate": hashlib.sha256(certificate).hexdigest(),
            "key": identity.fingerprint, "until": identity.ends.isoformat(), "step": theirs.step,
            "library": theirs.library, "serial": theirs.serial,
        } | ({} if guest.relay is None else {"relay": guest.relay})
        if not self.audit.record_about(self.called(identity.node), **opening):
            link.unrecorded = opening
        return link

    def _identified(self, certificate: bytes, federation: Federation, there: int | None) -> Identity:
        """The site that a certificate proves; raise InputError unless it is the expected neighbour."""
        identity = self._folder.peer(certificate, federation)
        if there is not None and identity.node != there:
            raise InputError(f"{self.called(there)} was dialled, and the certificate is {self.called(identity.node)}'s")
        if identity.node not in self._terms.neighbours:
            raise InputError(f"{self.called(identity.node)} is not a neighbour of {self.site.called} in this topology")
        return identity

    def _objection(self, theirs: Greeting, identity: Identity, mine: Greeting, dials: bool) -> str:
        """A further reason to refuse a neighbour, or an empty string."""
        if theirs.node != identity.node:
            return f"it claims to be node {theirs.node}, and its certificate is node {identity.node}'s"
        with self._taking:
            link = self._links.to(identity.node)
        same = link is not None and link.greeting.session == theirs.session
        if theirs.renews and (dials or link is None or not same):
            return "there is no connection to renew"
        if theirs.renews and link is not None and datetime.now(UTC) - link.begun < timedelta(seconds=WATCH):
            return f"a connection is renewed at most every {WATCH:g} s"
        if link is not None and not same and not dials:
            return f"{self.called(identity.node)} is taken: another process with its certificate is connected"
        return ""

    def _note_version(self, theirs: Greeting) -> None:
        if theirs.library != _version():
            name = self.called(theirs.node)
            self.report(name, f"{name} has quasiglobal {theirs.library}, this node {_version()}")

    def _refuse(self, whom: str, why: str, address: str = "") -> None:
        """Log and record that a neighbour or a stranger, or what it sent, is refused."""
        self.audit.refuse(whom, why, address)
        self.report(whom, f"refused {address if whom == STRANGERS else whom}: {why}")

    # -------------------------------------------------------------------------------------------- newer files

    def _watch(self) -> None:
        """Follow the federation file, pass it on, renew connections before their certificates end, record traffic."""
        recorded = time.monotonic()
        while not self._closing.wait(WATCH):
            for reports in (self.reports, self.audit.reports):
                reports.write_rest()
            tasks = [self._follow_file, self._pass_on, self._renew, self._record_closed]
            if time.monotonic() - recorded >= TRAFFIC:
                recorded = time.monotonic()
                tasks.append(self._record_traffic)
            for task in tasks:
                try:
                    task()
                except (InputError, Lost, OSError) as error:
                    self._refuse("federation", str(error))
                except Exception as error:                  # without this thread, no site is revoked here any more
                    self._refuse("federation", f"{type(error).__name__}: {error}")

    def _heard_of(self, there: int, note: bytes) -> None:
        """Install a federation file that a neighbour passed on."""
        try:
            if self._folder.accept(note, f"the federation file from {self.called(there)}"):
                self._follow_file()
        except (InputError, OSError) as error:
            self._refuse(self.called(there), str(error))

    def _follow_file(self) -> None:
        """Use a newer file: close the connections to sites that are not in it, or have another key there."""
        try:
            newer = self._folder.federation()
            if newer.serial == self.federation.serial:
                return
            own = self._folder.own(newer)
            if own.node != self.site.node:
                raise InputError(f"this site is node {own.node} in the new federation file; start it again")
        except InputError as error:
            for link in self._links.held():
                link.edge.cut(str(error))
            if self._relay is not None:
                self._relay.keep(lambda end: False)
            raise
        with self._taking:                                  # who is being admitted is checked after this, or cut below
            self.federation = newer
        self._names |= {site.node: site.called for site in newer.sites}
        log.warning("federation %s: file %d, of %d sites", newer.name, newer.serial, len(newer.sites))
        self.audit.record("federation", serial=newer.serial, sites=[site.name for site in newer.sites])
        for link in self._links.held():
            who = link.identity
            if not newer.has(who.node, who.fingerprint):
                self.audit.record("revoked", node=who.node, key=who.fingerprint, serial=newer.serial)
                link.edge.cut(f"revoked by federation file {newer.serial}")
        if self._relay is not None:
            self._relay.keep(self._may_relay)

    def _pass_on(self) -> None:
        serial = self.federation.serial
        for link in self._links.open():
            if link.serial < serial and link.edge.listening:
                link.edge.send_note(self._folder.text())
                link.serial = serial

    def _renew(self) -> None:
        """Replace dialled connections before a certificate ends; cut connections with an ended certificate."""
        for link in self._links.held():
            if link.has_ended:
                link.edge.cut("a certificate ended")
            elif link.dialled and link.channel.alive and link.edge.listening and link.is_due:
                with suppress(Lost):                        # the other connections are to be renewed too
                    self._dial(link.identity.node, time.monotonic() + ADMISSION, renews=link)

    def _record_closed(self, seconds: float = 0.0) -> None:
        """Record the bytes of the connections that are closed."""
        for link in self._links.take_ended(seconds):
            self.audit.record_about(
                self.called(link.identity.node), "closed", **link.traffic, step=self._terms.step()
            )

    def _record_traffic(self) -> None:
        """Record the bytes of the connections so far, if there are more: a killed process records no end."""
        for link in self._links.held():                     # whoever came and went before it does not hide it
            if link.unrecorded:
                self.audit.record(**link.unrecorded)
                link.unrecorded = {}
        moved = [link.traffic for link in self._links.all()]
        if moved and moved != self._moved:
            self._moved = moved
            self.audit.record("traffic", edges=moved, step=self._terms.step())


@dataclass(eq=False)
class Link:
    """An open connection to a neighbour, and its facts as of the opening."""

    edge: Edge
    channel: TLSChannel
    identity: Identity
    greeting: Greeting
    dialled: bool
    begun: datetime
    ends: datetime
    """Earlier end of the two certificates."""
    serial: int
    """Serial number of the federation file that the neighbour is known to have."""
    number: int = field(default_factory=itertools.count().__next__)
    """Number of the connection in this process, for the audit."""

    unrecorded: Json = field(default_factory=dict)
    """The line of the audit about its opening, if that was left out."""

    @property
    def traffic(self) -> Json:
        """The bytes in both directions so far, for the audit."""
        return {
            "connection": self.number, "node": self.identity.node, "sent": self.channel.sent,
            "received": self.channel.received,
        }

    @property
    def has_ended(self) -> bool:
        """Whether a certificate has ended."""
        return datetime.now(UTC) > self.ends

    @property
    def is_due(self) -> bool:
        """Whether a certificate ends soon: after three quarters of the time that was left when it was opened."""
        return datetime.now(UTC) > self.ends - (self.ends - self.begun) / 4


class Connections:
    """The connections to all neighbours until they are closed, in the order of opening; safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._newest: dict[int, Link] = {}
        """The last connection to each neighbour, also when it has ended: an earlier one does not replace it."""

    def take(self, link: Link) -> None:
        """Make this the connection to its neighbour; cut an earlier one, unless it belongs to the same edge."""
        with self._lock:
            before = self._newest.get(link.identity.node)
            self._links = [*self._links, link]
            self._newest = {**self._newest, link.identity.node: link}
        if before is not None and before.edge is not link.edge:
            before.edge.cut("it connected again")

    def to(self, there: int) -> Link | None:
        """The newest connection to a neighbour, if it is open."""
        return next((link for link in self.open() if link.identity.node == there), None)

    def open(self) -> list[Link]:
        """The newest connection to each neighbour, if it is open."""
        return [link for link in self._newest.values() if link.channel.alive]

    def held(self) -> list[Link]:
        """The newest connection to each neighbour until it is closed here; the other side may have closed its half."""
        return [link for link in self._newest.values() if not link.channel.ended.is_set()]

    def all(self) -> list[Link]:
        """The connections whose end is not yet recorded."""
        return self._links

    def take_ended(self, seconds: float = 0.0) -> list[Link]:
        """Remove and return the closed connections; wait for each up to `seconds`."""
        for link in self._links:
            link.channel.ended.wait(seconds)
        with self._lock:
            ended = [link for link in self._links if link.channel.ended.is_set()]
            self._links = [link for link in self._links if link not in ended]
        return ended


class Guest:
    """A connection that is not yet authenticated."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address = connection, address
        self.node: int | None = None
        """The site that its certificate proves."""
        self.relay: int | None = None
        """The site through which it comes."""

    @property
    def network(self) -> str:
        """The address; of an IPv6 address, the /64 network that usually has one owner."""
        with suppress(ValueError):
            ip = ipaddress.ip_address(self.address.partition("%")[0])
            if ip.version == 6 and ip.ipv4_mapped is None:
                return str(ipaddress.ip_network((ip, 64), strict=False))
        return self.address

    def dismiss(self) -> None:
        """End the connection; its thread notices."""
        with suppress(OSError):             # an SSLSocket's own shutdown would change the object under its thread
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class Listener:
    """Accepts connections at one address, and calls `receive` for each in a new thread.

    A connection counts as waiting until `receive` returns. If too many wait, the oldest one of the network with the
    most is dismissed, so that a flood from one place does not keep others out.
    """

    def __init__(
        self, host: str, port: int, receive: Callable[[Guest], None], report: Callable[[str, str], None]
    ) -> None:
        self._receive, self._report = receive, report
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._waiting: list[Guest] = []
        self._most = most_waiting()
        self._room = threading.Semaphore(self._most + self._most // 4)
        """Dismissed connections count until their threads end."""
        self._socket = bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and dismiss the waiting connections."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)         # wakes `accept`
        self._socket.close()
        with self._lock:
            for guest in self._waiting:
                guest.dismiss()

    def _accept(self) -> None:
        while not self._closing.is_set():
            if not self._room.acquire(timeout=1.0):
                continue
            try:
                connection, address = self._socket.accept()
                guest = Guest(connection, str(address[0]))
                self._make_room()
                with self._lock:
                    self._waiting.append(guest)
                threading.Thread(target=self._host, args=(guest,), daemon=True).start()
            except (OSError, RuntimeError) as error:        # no descriptors or threads left: wait until there are
                self._room.release()
                if not self._closing.is_set():
                    self._report(STRANGERS, f"cannot accept connections for now: {error}")
                self._closing.wait(0.1)

    def _host(self, guest: Guest) -> None:
        try:
            self._receive(guest)
        except Exception as error:                          # strangers may send anything
            self._report(STRANGERS, f"a connection from {guest.address} failed: {type(error).__name__}: {error}")
            log.debug("a connection failed", exc_info=True)
            guest.dismiss()
        finally:
            self._room.release()
            with self._lock, suppress(ValueError):          # dismissed before
                self._waiting.remove(guest)

    def _make_room(self) -> None:
        with self._lock:
            if len(self._waiting) < self._most:
                return
            counts = Counter(guest.network for guest in self._waiting)
            (crowd, _), = counts.most_common(1)
            oldest = next(guest for guest in self._waiting if guest.network == crowd)
            self._waiting.remove(oldest)
        oldest.dismiss()


def certificate_of(connection: ssl.SSLSocket) -> bytes:
    """The certificate of the other side, in DER."""
    return connection.getpeercert(binary_form=True) or b""


def most_waiting() -> int:
    """`MOST_WAITING`, or fewer where a process may open few files: strangers must not use them up."""
    if sys.platform == "win32":
        return MOST_WAITING
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_WAITING if most == resource.RLIM_INFINITY else max(min(MOST_WAITING, most // FILES_EACH), 2)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket at this address; all addresses of the machine for 0.0.0.0 and ::."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        remedy = "this node may run already" if taken else "name this machine's own address with --listen HOST:PORT"
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise InputError(f"cannot listen at {host}:{port}: {why}; {remedy}") from None


class Audit:
    """Appends chained JSON lines to a file, which is never truncated; without a file, does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._failed = False
        self.reports = Reports(lambda whom, sums: self.record("left out", who=whom, **sums))

    def record(self, event: str, **facts: object) -> None:
        """Append a line; an error such as a full disk is only logged."""
        if self._path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            append(self._path, {"time": now, "event": event} | facts)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("cannot write %s: %s; connections are not recorded", self._path, error.strerror)

    def record_about(self, whom: str, event: str, **facts: object) -> bool:
        """Append a line about a neighbour unless there are too many, and return whether it was; add up their bytes."""
        amounts = {name: value for name in ("sent", "received") if isinstance(value := facts.get(name), int)}
        passes = self.reports.pass_on(whom, None, amounts)
        if passes:
            self.record(event, **facts)
        return passes

    def refuse(self, whom: str, why: str, address: str = "") -> None:
        """Record the refusal of a neighbour or a stranger, unless it repeats or there are too many."""
        if self.reports.pass_on(whom, f"{address} {why}"):
            self.record("refused", who=whom, address=address, reason=why)


def _other_end(guest: Guest) -> str:
    """IP address and port of the other side of a connection."""
    try:
        host, port, *_ = guest.connection.getpeername()
    except (OSError, ValueError):                           # it has gone
        return guest.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@cache
def _version() -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("quasiglobal")
    return "unknown"
