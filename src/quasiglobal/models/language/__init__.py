"""Transformers that classify texts."""
