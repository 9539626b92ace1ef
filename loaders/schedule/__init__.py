"""Which sample is loaded when: datasets, order, prefetching, bad samples, state."""
