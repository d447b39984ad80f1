"""Runs on disk and what drives them."""
