"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test asserts times: on a busy machine an example may take as long as it likes.
settings.register_profile("fuelrail", deadline=None)
settings.load_profile("fuelrail")

# Shells start background jobs with Ctrl-C ignored, and children inherit that: tests interrupt some of theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
