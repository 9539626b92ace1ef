"""The reference trainer: a small multi-camera model, a loop that reads top to bottom, and its
launcher.
"""
