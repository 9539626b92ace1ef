"""The cache on local disk, which keeps the samples that are used soonest."""
