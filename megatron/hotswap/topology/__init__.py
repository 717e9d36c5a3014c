"""The grid of ranks (pure) and the process groups built on it."""
