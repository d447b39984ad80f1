"""What every layer uses: files that are written whole, and objects of the user's by their path."""
