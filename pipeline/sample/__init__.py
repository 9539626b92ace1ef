"""What one sample holds: its members, their rules, and how they are read."""
