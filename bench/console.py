"""Where reports are printed."""

from __future__ import annotations

from rich.console import Console

_WIDE = 200


def report_console() -> Console:
    """Standard output; in a file or a pipe wide enough that no table is cut."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=_WIDE)
