"""OpenScene and NAVSIM."""
