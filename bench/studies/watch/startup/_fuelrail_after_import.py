"""Calls a function when a module has been imported. The standard library only; see `sitecustomize`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
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
