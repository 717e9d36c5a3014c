"""The service around control/: gRPC, timers, and what a run leaves behind."""
