"""Triton kernels for convolutional networks stacked over nodes."""
