"""Authenticated messages between processes and sites: rows of numbers with a header, and who may send them.

It knows no learning and no graph: of a topology it gets a list of neighbours. `membership.py` tracks them, `edge.py` is
one link, over a transport, with the checks of what comes, and `memory.py` is where messages lie.
Within a cluster, `gloo.py` is the transport and opens edges through the store of `rendezvous.py`. Between sites,
`tls.py` is the transport, and `sites.py` opens edges: it dials, or listens, and exchanges a `greeting.py`.
Who takes part in a federation is decided by `certificates.py`, the `federation_file.py` that the organiser signs, and
the `folders.py` of both sides. `cryptography` is imported inside functions, so that a training on one machine does not
load it.
"""
