"""Data sets, who holds what of them, and batches."""
