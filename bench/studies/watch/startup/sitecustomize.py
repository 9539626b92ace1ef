"""Starts a watch in each process of ``fuelrail watch -- COMMAND``, once it has imported torch.

Its folder is first in PYTHONPATH there. Python imports ``sitecustomize`` when it starts; one that
was there before is imported too. Nothing else is imported before torch is.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class AfterImport:
    """Calls ``call`` with a module when it has been run: a finder in ``sys.meta_path`` until then."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self.name = name
        self.call = call
        if name in sys.modules:
            self._try(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, *_: Any) -> Any:
        """Find the module by all other finders; its own loader makes the call once, after it."""
        if name != self.name:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        if loader is not None:
            run = loader.exec_module

            def run_and_call(module: Any) -> None:
                loader.exec_module = run
                run(module)
                self._try(module)

            loader.exec_module = run_and_call
        return spec

    def _try(self, module: Any) -> None:
        try:
            self.call(module)
        except Exception as error:  # noqa: BLE001 - the script runs on
            sys.stderr.write(f"fuelrail: {self.name} is not watched: {error}\n")


def _start(_: Any) -> None:
    from fuelrail.bench.studies.watch.watch import start_by_environment

    start_by_environment()


if __name__ == "sitecustomize":
    if os.environ.get("FUELRAIL_WATCH"):
        AfterImport("torch", _start)
    # The sitecustomize that this one hides.
    path = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
