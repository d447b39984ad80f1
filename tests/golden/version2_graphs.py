"""A graph of a user's own, for runs whose topology is Python code."""

import networkx as nx


def one_way():
    """Links in one direction between four nodes; node 1 has two senders, so the weights are not doubly stochastic."""
    return nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (3, 1)])
