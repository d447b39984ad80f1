"""The commands demo, reproduce, leaderboard and report."""
