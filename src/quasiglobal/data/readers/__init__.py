"""Readers: one module per data format."""
