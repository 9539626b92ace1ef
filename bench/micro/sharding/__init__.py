"""The sharding engine against other writers."""
