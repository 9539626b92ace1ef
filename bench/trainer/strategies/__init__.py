"""Ways to train one model on several ranks."""
