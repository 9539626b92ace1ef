"""The planner against published figures, emulated clusters and real runs."""
