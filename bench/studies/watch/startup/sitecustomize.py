"""Starts a watch in each process of ``fuelrail watch -- COMMAND``, once it has imported torch.

Its folder is first in PYTHONPATH there. Python imports ``sitecustomize`` when it starts; one that
was there before is imported too. Nothing else is imported before torch is.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _start(_: object) -> None:
    from fuelrail.bench.studies.watch.watch import start_by_environment

    start_by_environment()


if __name__ == "sitecustomize":
    if os.environ.get("FUELRAIL_WATCH"):
        from _fuelrail_after_import import AfterImport

        AfterImport("torch", _start)
    # The sitecustomize that this one hides.
    path = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
