"""Nodes spread over processes and machines."""
