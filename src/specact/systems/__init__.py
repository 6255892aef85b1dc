"""One paper per file: its equations, what we changed, and the code."""
