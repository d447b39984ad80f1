"""Transformers for text classification."""
