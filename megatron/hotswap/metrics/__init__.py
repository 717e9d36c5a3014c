"""Numbers for Prometheus: the endpoint that every process of ours shares. Who counts what stands beside it (metrics.py there)."""

#: Below the run directory: a target file for each endpoint.
FOLDER = "metrics"
