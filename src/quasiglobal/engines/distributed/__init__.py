"""Distributed engine: nodes spread over processes and machines.

`engine.py` mixes, `membership.py` tracks neighbouring processes, `edge.py` is one link, `channel.py` its transport,
`checks.py` and `trust.py` decide what counts of a message, and `pace.py` how long to wait for it.
Within a cluster, `gloo.py` is the transport, and `opening.py` opens edges through the store of `rendezvous.py`.
Between sites, `tls.py` is the transport, and `sites.py` opens edges: it dials, or takes what `listener.py` accepts.
"""

from quasiglobal.engines.distributed.audit import Audit
from quasiglobal.engines.distributed.engine import Distributed, MeanLost
from quasiglobal.engines.distributed.gloo import Meeting, Store
from quasiglobal.engines.distributed.membership import Membership
from quasiglobal.engines.distributed.opening import Way
from quasiglobal.engines.distributed.rendezvous import all_gather, join, launched, meet, serve, spread
from quasiglobal.engines.distributed.sites import SiteOpener
from quasiglobal.engines.distributed.trust import SUGGESTED

__all__ = [
    "SUGGESTED", "Audit", "Distributed", "MeanLost", "Meeting", "Membership", "SiteOpener", "Store", "Way",
    "all_gather", "join", "launched", "meet", "serve", "spread",
]
