"""Starts a watch in each process of ``fuelrail watch -- COMMAND``, once it has imported torch.

Its folder is first in PYTHONPATH there. Python imports ``sitecustomize`` when it starts; one that
was there before is imported too. Nothing else is imported before torch is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as if it were not here, and starts the watch when its module has been run."""

    loader: Any

    def find_spec(self, name: str, *_: Any) -> Any:
        """Find torch by all other finders."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        """Make torch's module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run torch's module, then start the watch."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        try:
            from fuelrail.bench.studies.watch.watch import start_by_environment

            start_by_environment()
        except Exception as error:  # noqa: BLE001 - the script runs on
            sys.stderr.write(f"fuelrail: this process is not watched: {error}\n")


def _run_other() -> None:
    """Run the sitecustomize that this one hides."""
    path = [entry for entry in sys.path if Path(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get("FUELRAIL_WATCH"):
        sys.meta_path.insert(0, _AfterTorch())
    _run_other()
