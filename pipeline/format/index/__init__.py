"""The tables of a dataset: shards, samples and keys, in mapped files of which a remote reader
fetches blocks.
"""
