"""Samples become batches on a device: parse, decode, collate, transfer."""
