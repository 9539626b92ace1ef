"""The channel table: what a sample holds, how it is stored, and how it moves."""
