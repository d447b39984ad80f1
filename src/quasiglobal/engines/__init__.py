"""Where the nodes live: all here as rows of one tensor, or spread over processes."""
