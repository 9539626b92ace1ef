"""Columns on disk, for joins of tables that are larger than memory."""
