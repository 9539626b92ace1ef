"""The cache on local disk, which keeps the samples that are needed soonest."""
