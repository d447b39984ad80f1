"""Topologies: graphs and their mixing matrices W(t), by constructor, by name (`parse`), or user-defined."""

from quasiglobal.topology import finite_time, given, labels, random, static
from quasiglobal.topology.finite_time import *
from quasiglobal.topology.given import *
from quasiglobal.topology.labels import *
from quasiglobal.topology.parsing import parse
from quasiglobal.topology.random import *
from quasiglobal.topology.static import *
from quasiglobal.topology.topology import Topology

__all__ = ["Topology", "parse"]
__all__ += finite_time.__all__
__all__ += given.__all__
__all__ += labels.__all__
__all__ += random.__all__
__all__ += static.__all__
