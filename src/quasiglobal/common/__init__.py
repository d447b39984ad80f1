"""Helpers for every layer: atomic file writes, imports of user-defined objects, mixing matrices."""
