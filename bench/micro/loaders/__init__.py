"""The loader and its decoders against other ways to do the same work."""
