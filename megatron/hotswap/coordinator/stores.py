"""--hot-swap-store by name: where a coordinator records its decisions."""

JOURNAL = "journal"
