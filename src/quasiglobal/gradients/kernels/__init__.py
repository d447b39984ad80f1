"""Convolutional networks stacked over nodes, by kernels of their own."""
