"""Where sensors are, and how their pictures are made."""
