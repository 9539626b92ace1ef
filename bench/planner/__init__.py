"""Models of training at scale."""
