"""Engines: host the nodes as rows of one tensor, or spread over processes."""
