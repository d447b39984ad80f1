"""Training from Python: `qg.train`, its result, and the texts that name a user's own objects."""
