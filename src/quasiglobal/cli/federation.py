"""Commands that manage the sites of a federation: federation for the organiser, site for each site."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.cli import OWN
from quasiglobal.cli.arguments import File, Json, call
from quasiglobal.cli.terminal import Listing, Values, console, preparing, print_json, say_written, size_in_words
from quasiglobal.data.dataset import deviations
from quasiglobal.errors import InputError, unknown
from quasiglobal.peers import federation_file
from quasiglobal.peers.audit import AUDIT, Story, Trail
from quasiglobal.peers.certificates import fingerprint, read_text, spoken
from quasiglobal.peers.federation_file import Federation, Site
from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.runs.constants import KIND, Share, add_to, doubts, read_share, share_of, terms
from quasiglobal.topology.parsing import count_nodes, pairs_of

FederationFolder = Annotated[Path, arg(metavar="FOLDER", help="The organiser's folder.")]
OwnFolder = Annotated[Path, arg(metavar="FOLDER", help="The site's folder.")]
Compared = Annotated[bool, arg(name="yes", help="All fingerprints were compared: do not ask.")]


def new(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    topology: str,
    days: float = 365,
    folder: FederationFolder = Path("federation"),
) -> None:
    """Found a federation: make its key and an empty federation file.

    The key, organiser.key, approves and revokes sites. Keep the folder on a machine that trains nothing, and an
    off-line copy of it: nobody can approve or revoke sites without it.

    Args:
        name: The federation's name: lower-case letters, digits and hyphens.
        topology: The graph of the experiment, such as ring:4. It sets the number of nodes and their neighbours.
        days: Days until the federation ends; `qg federation extend` prolongs it.
    """
    place, nodes = OrganiserFolder(folder), count_nodes(topology)
    made = place.new(name, topology, days)
    say_written([place.key, place.file])
    console.print(f"Federation {name}: {nodes} nodes, until {made.ends:%Y-%m-%d}.")
    _say_fingerprint("Your fingerprint, for the sites to compare by telephone", place.fingerprint)
    console.print("Each site runs:")
    console.print(f"    qg site request --federation {name} --name SITE --address HOST:PORT", soft_wrap=True)


def approve(
    request: Annotated[Positional[tuple[Path, ...]], arg(metavar="REQUEST...")],
    node: int | None = None,
    compared: Compared = False,
    folder: FederationFolder = Path("federation"),
) -> None:
    """Approve sites: add their requests to the federation file.

    Each request is asked for by itself; if one is not approved, nothing is changed. A known site keeps its number; a
    new request changes its address.

    Args:
        request: Files that `qg site request` wrote.
        node: Number of the node, from 0, for one request; by default the lowest free one.
    """
    if not request:
        raise InputError("name the requests to approve, as in `qg federation approve request-*.json`")
    asked = [federation_file.read_request(read_text(path), str(path)) for path in request]

    def confirm(site: Site) -> None:
        relays = ", which relays between sites that only dial" if site.relays else ""
        _say_fingerprint(f"{site.name}, {site.address or 'which only dials'}{relays}", site.fingerprint)
        _confirm(
            f"Did {site.name} read this fingerprint to you, by telephone? Make it node {site.node}?", compared,
            f"{site.name} was not approved, so nothing was changed; compare its fingerprint by telephone, or leave out "
            "its request",
        )

    place = OrganiserFolder(folder)
    graph = place.read().topology
    _say_next(place, place.approve(asked, count_nodes(graph), pairs_of(graph), node, confirm))


def revoke(
    site: Annotated[Positional[str], arg(metavar="SITE")], folder: FederationFolder = Path("federation")
) -> None:
    """Exclude a site: write the next federation file without it.

    Install the new file at one site that the others reach; running sites pass it on and close their edges to the
    revoked one. The number is free for another site.

    Args:
        site: The site's name, or its node number.
    """
    place = OrganiserFolder(folder)
    _say_next(place, place.revoke(site))


def extend(days: float = 365, folder: FederationFolder = Path("federation")) -> None:
    """Prolong the federation: write the next file, with a later end.

    Args:
        days: Days from now until the federation ends; never earlier than its present end.
    """
    place = OrganiserFolder(folder)
    _say_next(place, place.extend(days))


def pool(
    file: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE...")],
    experiment: Annotated[Path, arg(metavar="FILE.toml")],
    folder: FederationFolder = Path("federation"),
) -> None:
    """Pool the sites' constants, and add them to the experiment.

    These are the classes, the shape, and the mean and standard deviation of all sites' training examples together.
    Send the experiment to the sites: all normalise by it, and a node with other constants is refused.

    Args:
        file: Files that `qg site constants` wrote, one of each site.
        experiment: The experiment that all sites will train.
    """
    found, shares = OrganiserFolder(folder).read(), dict[str, Share]()
    for path in file:
        site, share = read_share(read_text(path), found, str(path))
        if site in shares:
            raise InputError(f"{path} is a second file of {site}; name one file of each site")
        shares[site] = share
    if not shares:
        raise InputError("name the sites' files, as in `qg federation constants constants-*.json`")
    add_to(experiment, terms(shares))
    Listing([{"site": site} | asdict(share) for site, share in shares.items()], {
        "site": "site", "examples": "examples", "mean": lambda row: _short(row["mean"]),
        "std": lambda row: _short(deviations(row["variance"])),
    }).show()
    for doubt in doubts(shares):
        console.print(f"⋆ {doubt}", soft_wrap=True)
    if left := [site.name for site in found.sites if site.name not in shares]:
        console.print(f"Without {', '.join(left)}, of which no file was named.")
    say_written([experiment])


def show(folder: FederationFolder = Path("federation"), json: Json = False) -> None:
    """Show the federation: its sites, addresses and fingerprints."""
    place = OrganiserFolder(folder)
    _show(place.read(), place.fingerprint, json)


def request(
    federation: str,
    name: str,
    address: Annotated[str | None, arg(metavar="HOST:PORT")] = None,
    relay: bool = False,
    folder: OwnFolder = Path("site"),
) -> None:
    """Request to join: make the site's key and a request file.

    The key never leaves the folder. Send the request by any means, such as e-mail, and read your fingerprint to the
    organiser by telephone. Run the command again to ask for another address; the key stays.

    Args:
        federation: The federation's name.
        name: The site's name: lower-case letters, digits and hyphens.
        address: Address at which neighbours reach this site; leave it out if it cannot accept connections.
        relay: Agree to connect other sites that cannot accept connections either: their encrypted bytes then pass
            through this site, which cannot read them.
    """
    path, asked = SiteFolder(folder).request(federation, name, address, relay)
    say_written([path])
    _say_fingerprint("Your fingerprint, for the organiser to compare by telephone", asked.fingerprint)
    console.print(f"Send {path} to the organiser.", soft_wrap=True)


def install(
    source: Annotated[Positional[Path], arg(metavar="FILE")],
    compared: Compared = False,
    folder: OwnFolder = Path("site"),
) -> None:
    """Install the organiser's file, the first or a newer one.

    The first file asks you to compare the organiser's fingerprint by telephone; from then on only files with this
    organiser's signature are accepted. A running `qg node` notices a newer file and passes it on.

    Args:
        source: The federation.json that the organiser sent.
    """
    place = SiteFolder(folder)
    text = read_text(source)
    if not place.is_pinned:
        _say_fingerprint("The organiser's fingerprint", fingerprint(federation_file.organiser_of(text, str(source))))
        _confirm("Did the organiser read this fingerprint to you, by telephone?", compared)
        place.pin(text, str(source))
    fresh = place.accept(text, str(source))
    found = place.federation()
    own = place.own(found)
    shown = place.renew() if place.key.exists() else place.shown()
    console.print(
        f"{'Installed' if fresh else 'Already installed:'} federation {found.name}, serial {found.serial}, until "
        f"{found.ends:%Y-%m-%d}. This site is node {own.node}, {own.name}."
    )
    if shown:
        console.print(f"Its certificate ends {shown.ends:%Y-%m-%d %H:%M} UTC; a running node renews it.")


def renew(days: float = 7, key: File | None = None, folder: OwnFolder = Path("site")) -> None:
    """Make a fresh TLS certificate from the site's key.

    A running `qg node` does so itself. Needed only if the site's key is kept elsewhere, or to replace a certificate
    whose key may be known to others.

    Args:
        days: Days until the certificate ends, at most 31.
        key: The site's key, site.key, if it is not in the folder.
    """
    made = SiteFolder(folder).renew(timedelta(days=min(max(days, 0), 1e6)), key)
    console.print(f"The certificate of node {made.node} ends {made.ends:%Y-%m-%d %H:%M} UTC.")


def constants(
    data: Annotated[Positional[str], arg(metavar="DATA")],
    label: str = "",
    key: File | None = None,
    folder: OwnFolder = Path("site"),
) -> None:
    """Write the constants of this site's data, for the organiser to pool.

    The signed file tells the organiser the number of training examples, the mean and the variance of each channel or
    column, the shape, and the names of the classes and columns; of texts, only the classes. The mean of few examples,
    or the name of a rare class, can say something about a person.

    Args:
        data: Your data, as for `qg node --data`.
        label: The column of a table that is predicted, if the data are a table.
        key: The site's key, site.key, if it is not in the folder.
    """
    with preparing():
        share = share_of(data, label)
    path = SiteFolder(folder).sign(KIND, asdict(share), key)
    say_written([path])
    sums = f"{share.examples:,} training examples, with the mean and variance of each channel" if share.mean else ""
    lists = {"shape": share.shape, "columns": share.features, "classes": share.classes}
    told = [sums, *(f"{what} {', '.join(map(str, facts))}" for what, facts in lists.items() if facts)]
    console.print(f"It tells the organiser: {'; '.join(filter(None, told))}.", soft_wrap=True)
    console.print(f"Send {path} to the organiser.", soft_wrap=True)


def status(folder: OwnFolder = Path("site"), json: Json = False) -> None:
    """Show the federation, and the site's number and certificate."""
    place = SiteFolder(folder)
    found = place.federation()
    organiser = fingerprint(federation_file.organiser_of(place.text(), str(place.file)))
    shown = place.shown()
    ends = shown and shown.ends.strftime(federation_file.TIME)
    _show(found, organiser, json, node=place.own(found).node, certificate_ends=ends)


def audit(
    run: Annotated[Positional[Path], arg(metavar="RUN", help="A run folder of this site, or an audit.jsonl.")],
    hash: Annotated[str | None, arg(metavar="HASH")] = None,
    json: Json = False,
) -> None:
    """Check the record of a run: who connected, when, and how many bytes.

    Each line of audit.jsonl has the hash of the line before it, so a line that was changed, inserted or removed breaks
    the chain there. A file that was rewritten as a whole, or has lost its last lines, goes unseen unless you have kept
    its last hash elsewhere: note the one that this command prints, and give it to a later check as --hash.

    Args:
        hash: A hash that an earlier check printed, to be found in the file.
    """
    path = run / AUDIT if run.is_dir() else run
    trail = Trail.read(path)
    story, place = Story(trail.lines), trail.place_of(hash or "")
    if json:
        print_json({
            "file": str(path), "lines": len(trail.hashes), "not_chained": trail.unchained, "torn": trail.torn,
            "breaks": [{"line": number, "why": why} for number, why in trail.breaks.items()],
            "last_hash": trail.last_hash, "line_of_hash": place or None,
            "processes": story.processes, "connections": story.connections, "events": story.events,
        })
    else:
        _show_story(story)
        for line in _chain_in_words(trail):
            console.print(line, soft_wrap=True)
        if place and not any(number <= place for number in trail.breaks):
            console.print(f"The given hash is that of line {place}: all lines up to it are as they were then.")
    if hash is not None and not place:
        raise InputError(f"no line of {path} has the given hash: it was rewritten, or its last lines are missing")
    if trail.breaks:
        (number, why), *others = trail.breaks.items()
        more = f" (and at {len(others)} more lines)" if others else ""
        raise InputError(f"the chain of {path} breaks at line {number}, which {why}{more}")


def _show_story(story: Story) -> None:
    """Print the processes, the connections and the other events."""
    Listing(story.processes, {
        "when": _when,
        "this site": lambda row: "\n".join((
            _called(row), f"version {row['version'] or '-'}", f"experiment {row['experiment'] or '-'}",
            "steps {}-{}".format(*row["steps"]),
        )),
        "data": lambda row: spoken(row["data"] or "-", 4), "key": lambda row: spoken(row["key"] or "-", 4),
    }, title="This site's processes").show()
    Listing(story.connections, {
        "when": _when,
        "neighbour": lambda row: f"{_called(row)}\n{row['address'] or '-'}",
        "models": lambda row: f"sent {size_in_words(row['sent'])}\nreceived {size_in_words(row['received'])}",
        "key": lambda row: spoken(row["key"] or "-", 4),
    }, title="Connections").show()
    if story.events:
        names = ("time", "event", "line", "before", "torn")
        Listing(story.events, {
            "at": lambda row: _minute(str(row.get("time"))), "event": lambda row: str(row.get("event")),
            "what": lambda row: ", ".join(f"{name} {value}" for name, value in row.items() if name not in names),
        }, title="Other events", folds={"what": 30}).show()


def _chain_in_words(trail: Trail) -> Iterator[str]:
    """Sentences about the chain."""
    if trail.unchained:
        yield f"Lines 1 to {trail.unchained} are not chained: version 2 wrote them. The next line has the hash of all."
    if trail.torn:
        yield f"A crash tore line {' and '.join(map(str, trail.torn))}."
    if not trail.breaks:
        yield f"The chain of {len(trail.hashes) - trail.unchained} lines does not break. The last hash is"
    else:
        yield "The chain breaks. The last hash is"
    yield f"    {trail.last_hash}"
    yield (
        "A file that was rewritten as a whole, or has lost its last lines, looks the same. Keep this hash elsewhere, "
        "and check with --hash that it is still there."
    )


def _when(row: Values) -> str:
    """The beginning of a process or a connection, the last line about it, and how it ended."""
    return "\n".join((_minute(row["began"]), _minute(row["until"]), row["end"] or "not recorded"))


def _minute(time: str) -> str:
    """A time of the audit, which is in UTC, in minutes."""
    return time[:16].replace("T", " ")


def _called(row: Values) -> str:
    return f"node {row['node']}" + (f" ({row['site']})" if row["site"] else "")


SUBCOMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "federation": {"new": new, "approve": approve, "revoke": revoke, "extend": extend, "constants": pool, "show": show},
    "site": {
        "request": request, "install": install, "constants": constants, "renew": renew, "show": status, "audit": audit,
    },
}
"""The subcommands of `qg federation` and `qg site`."""


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    commands = SUBCOMMANDS[name]
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: qg {name} COMMAND [OPTIONS]\n\n{OWN['Between sites'][name][1]}\n")
        for word, function in commands.items():
            print(f"  {word:<9} {(function.__doc__ or '').splitlines()[0]}")
        print(f"\n`qg {name} COMMAND --help` explains one command.")
    elif words[0] not in commands:
        raise unknown(f"command of qg {name}", words[0], commands)
    else:
        call({f"{name} {words[0]}": commands[words[0]]}, f"{name} {words[0]}", words[1:])


def _short(values: Sequence[float]) -> str:
    """The first of some numbers."""
    return " ".join(f"{value:.4g}" for value in values[:3]) + (" …" if len(values) > 3 else "")


def _say_fingerprint(whose: str, print_: str) -> None:
    console.print(f"{whose}:")
    for line in spoken(print_).splitlines():
        console.print(f"    {line}")


def _confirm(
    question: str, compared: bool,
    refused: str = "nothing was changed; compare the fingerprint by telephone, then run the command again",
) -> None:
    """Ask on the terminal; raise unless the answer is yes."""
    if compared:
        return
    if not sys.stdin.isatty():
        raise InputError("compare the fingerprint by telephone, then run the command again with --yes")
    answer = ""
    with suppress(EOFError):                                # Ctrl-D
        answer = input(f"{question} [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError(refused)


def _say_next(place: OrganiserFolder, federation: Federation) -> None:
    say_written([place.file])
    n = count_nodes(federation.topology)
    console.print(f"Serial {federation.serial}: {len(federation.sites)} of {n} nodes have a site.")
    console.print("Send the file to the sites. Each runs: qg site install federation.json")


def _show(federation: Federation, organiser: str, json: bool, **more: object) -> None:
    sites = [
        {
            "node": site.node, "site": site.name, "address": site.address, "relays": site.relays,
            "fingerprint": site.fingerprint,
        }
        for site in federation.sites
    ]
    if json:
        print_json({
            "federation": federation.name, "serial": federation.serial,
            "ends": federation.ends.strftime(federation_file.TIME),
            "topology": federation.topology, "organiser": organiser, "sites": sites, **more,
        })
        return
    console.print(
        f"Federation {federation.name}, serial {federation.serial}, {federation.topology}, until "
        f"{federation.ends:%Y-%m-%d}"
    )
    _say_fingerprint("Organiser's fingerprint", organiser)
    Listing(sites, {
        "site": "site", "node": "node",
        "address": lambda row: (row["address"] or "only dials") + (", relays" if row["relays"] else ""),
        "fingerprint": lambda row: spoken(row["fingerprint"], 4),
    }, folds={"address": 20}).show()
    if "node" in more:
        console.print(f"This site is node {more['node']}; its certificate ends {more['certificate_ends'] or '(none)'}.")
