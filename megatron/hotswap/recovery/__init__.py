"""What to go back to (plan, pure) and how a worker gets there (execute)."""
