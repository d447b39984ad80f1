"""Distributed engine: nodes spread over processes and machines.

`engine.py` mixes, `membership.py` tracks neighbouring processes, `edge.py` is one link, `gloo.py` is its transport,
`checks.py` decides which messages count, `pace.py` how long to wait for them, and `rendezvous.py` connects processes to
a common store.
"""

from quasiglobal.engines.distributed.engine import Distributed, MeanLost
from quasiglobal.engines.distributed.gloo import Meeting, Store
from quasiglobal.engines.distributed.rendezvous import all_gather, join, launched, meet, serve, spread

__all__ = ["Distributed", "MeanLost", "Meeting", "Store", "all_gather", "join", "launched", "meet", "serve", "spread"]
