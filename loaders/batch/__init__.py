"""From samples to batches on a device: parse, decode, collate, transfer."""
