"""The only files that touch Megatron. Each lists what it replaces and why; guard.py refuses what they were not written for."""
