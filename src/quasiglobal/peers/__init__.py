"""Authenticated messages between processes and sites: rows of numbers with a header, and who may send them.

It knows no learning and no graph: of a topology it gets a list of neighbours. `membership.py` tracks them, `edge.py` is
one link, `channel.py` its transport, `checks.py` bounds a message, and `pace.py` says how long to wait for one.
Within a cluster, `gloo.py` is the transport, and `opening.py` opens edges through the store of `rendezvous.py`.
Between sites, `tls.py` is the transport, and `sites.py` opens edges: it dials, or takes what `listener.py` accepts.
Who takes part in a federation is decided by keys, certificates, the federation file that the organiser signs, and the
folders of both sides: `organiser.py` and `site.py`. `cryptography` is imported inside functions, so that a training on
one machine does not load it.
"""
