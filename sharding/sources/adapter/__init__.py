"""Sources that yield frames: the base class of adapters, and what it makes rows of the scan
table from.
"""
