"""Where reports are printed, and how the commands that make them end."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

FAILED: Final = 1
INTERRUPTED: Final = 130
NOTHING_MEASURED: Final = "before anything was measured whole: no report was written"
"""What a KeyboardInterrupt says that ends a command too early for a partial report."""

_WIDE = 200


def report_console() -> Console:
    """Standard output; in a file or a pipe wide enough that no table is cut."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=_WIDE)


def exit_code(cut_off: str | None, *, interrupted: bool) -> int:
    """The exit code of a command whose report is written; why a partial one is partial goes to standard error."""
    if cut_off is not None:
        sys.stderr.write(f"fuelrail: error: the report is partial: {cut_off}\n")
    return INTERRUPTED if interrupted else FAILED if cut_off is not None else 0
