"""The files of logs: MCAP and SQLite, read the same way."""
