"""Clocks, limits of the machine, occupancy, and the records of a run."""
