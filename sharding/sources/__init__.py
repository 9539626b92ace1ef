"""Source adapters: one module (or a few) for each native dataset format."""
