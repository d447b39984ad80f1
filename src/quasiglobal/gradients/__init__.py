"""Gradients of many copies of one model."""
