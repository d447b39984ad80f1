"""Training: what to run, the rows of a program, and the loop."""
