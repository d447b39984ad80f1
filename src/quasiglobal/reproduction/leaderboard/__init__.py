"""One frozen protocol for all methods: `qg leaderboard`."""
