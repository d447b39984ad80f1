"""Training from Python: `qg.train`, its result, and the strings that name a user's objects."""
