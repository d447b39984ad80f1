"""Data sets, their partition among the nodes, and batches."""
