"""``fuelrail browse``."""

from __future__ import annotations

import contextlib

from fuelrail.bench.report.options import DATASET, command
from fuelrail.bench.studies.browse.server import BrowseOptions, browse


def serve(dataset: str, options: BrowseOptions) -> int:
    """Serve a dataset until the command is interrupted, the usual way to end it."""
    with browse(dataset, options) as browser, contextlib.suppress(KeyboardInterrupt):
        print(f"{browser.url}   (Ctrl-C ends it)", flush=True)  # noqa: T201
        browser.thread.join()
    return 0


COMMANDS = {
    "browse": command(
        "look into a dataset in a browser",
        serve,
        arguments={"dataset": DATASET},
        options=(BrowseOptions,),
    )
}
