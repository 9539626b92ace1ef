"""Ranks of a run on this host: started, watched, delayed on purpose, and traced."""
