"""Authenticated messages between processes and sites: rows of numbers with a header.

The package is independent of learning and of graphs: of a topology it gets a list of neighbours. `membership.py` tracks
them, `edge.py` is one link over a transport, with the checks of received messages, and `memory.py` has their memory.
Within a cluster, `gloo.py` is the transport and opens edges through the store of `rendezvous.py`. Between sites,
`tls.py` is the transport, and `sites.py` opens edges: it dials, or listens, and exchanges a `greeting.py`.
The members of a federation are defined by `certificates.py`, the `federation_file.py` that the organiser signs, and the
`folders.py` of both sides. `cryptography` is imported inside functions, so training on one machine does not load it.
"""
