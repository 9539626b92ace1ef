"""Other loaders at the same work: each writes the samples in its own format, and hands out the
same images.
"""
