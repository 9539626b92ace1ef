"""Local and remote file systems, and retries."""
