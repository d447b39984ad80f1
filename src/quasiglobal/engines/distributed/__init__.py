"""Distributed engine: nodes spread over processes and machines.

`engine.py` mixes, `membership.py` tracks neighbouring processes, `edge.py` is one link, `channel.py` its transport,
`gloo.py` the transport of one cluster, and `rendezvous.py` connects processes to a common store.
"""

from quasiglobal.engines.distributed.engine import Distributed, spread
from quasiglobal.engines.distributed.gloo import Meeting, Store
from quasiglobal.engines.distributed.rendezvous import all_gather, join, launched, meet, serve

__all__ = ["Distributed", "Meeting", "Store", "all_gather", "join", "launched", "meet", "serve", "spread"]
