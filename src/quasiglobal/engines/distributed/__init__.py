"""Nodes spread over processes and machines.

`engine.py` mixes, `membership.py` knows who is there, `edge.py` is one link, `gloo.py` carries its bytes, and
`rendezvous.py` is where processes meet.
"""

from quasiglobal.engines.distributed.engine import Distributed, spread
from quasiglobal.engines.distributed.gloo import Meeting, Store
from quasiglobal.engines.distributed.rendezvous import all_gather, join, launched, meet, serve

__all__ = ["Distributed", "Meeting", "Store", "all_gather", "join", "launched", "meet", "serve", "spread"]
