"""Check and describe a finished dataset."""
