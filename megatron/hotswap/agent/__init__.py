"""The agent process: small, long-lived, no torch. It owns the slots, the replication traffic and its workers' lives."""
