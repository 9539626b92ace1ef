"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# No test asserts times: on a busy machine an example may take as long as it likes.
settings.register_profile("fuelrail", deadline=None)
settings.load_profile("fuelrail")
