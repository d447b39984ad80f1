"""Rendering of results: plots, tables and reports."""
