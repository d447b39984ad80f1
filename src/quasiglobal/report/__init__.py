"""What a run looks like: plots and tables."""
