"""Run folders, and the drivers that train, tune and export runs."""
