"""Training: experiments, programs of many rows, and the training loop."""
