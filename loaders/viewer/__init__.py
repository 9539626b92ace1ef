"""What people look at: samples and batches as pictures."""
