"""The order of training: a pure function from seed, epoch and position to a sample."""
