"""Algorithms after 2021, for which the fast tests run less than for the others."""

LATER = (
    "momentum-tracking", "ed", "edm", "decentlam", "gossip-pga", "gut", "qg-gut", "k-gt", "led", "proxskip", "gt-nsgdm",
    "dsgd-clip", "dadamw", "dsgd-ac", "dfedavgm", "dfedsam", "diloco", "noloco",
)

CHANNELS = ("relaysgd", "lt-admm", "sgp", "qg-sgp", "push-diging", "ab", "choco", "adagossip", "beer", "motef")
"""Those of them that use channels of their own: messages per edge, pushes, compressed messages."""

TWINS = ("ed", "gut", "led", "dsgd-clip", "dadamw", "dsgd-ac", "dfedavgm", "motef", "noloco", "qg-sgp", "adagossip")
"""Algorithms that share large parts of their code with one that runs all fast tests."""
