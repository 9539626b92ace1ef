"""The harness: measures loaders and training runs. The top floor: may import every other folder."""
