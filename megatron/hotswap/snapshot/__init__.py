"""One rank's part of a generation: its layout (pure), its slots in shared memory, and the engine that fills them."""
