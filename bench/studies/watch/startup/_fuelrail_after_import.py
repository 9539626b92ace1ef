"""Calls a function when a module has been imported. The standard library only; see `sitecustomize`."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module as if it were not here, and calls ``call`` with it when it has been run."""

    loader: Any

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
        """Find the module by all other finders."""
        if name != self.name:
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        """Make the module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module, then make the call."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self._try(module)

    def _try(self, module: Any) -> None:
        try:
            self.call(module)
        except Exception as error:  # noqa: BLE001 - the script runs on
            sys.stderr.write(f"fuelrail: {self.name} is not watched: {error}\n")
