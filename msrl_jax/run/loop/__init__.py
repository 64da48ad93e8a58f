"""A run in progress: the loop, its hooks and callbacks, and the guard against non-finite values."""
