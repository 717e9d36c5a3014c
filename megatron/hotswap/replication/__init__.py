"""Where replicas go (placement, pure) and how they get there (one interface, several transports)."""
