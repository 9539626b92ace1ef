"""The schedule of samples: datasets, order, prefetching, bad samples, state."""
