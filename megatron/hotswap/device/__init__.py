"""What lets the trainer run on devices it was not written for. Today that is cpu.py: no GPU at all, over gloo."""
