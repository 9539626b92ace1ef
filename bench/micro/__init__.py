"""Micro-benchmarks: one part of Fuelrail against what it stands in for, as ratios taken in one
run.
"""
