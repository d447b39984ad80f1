"""One module for each format of data."""
