"""A registry that installed packages add to by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from fuelrail.pipeline.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, T]):
    """Names to code: what is built in, then what the entry points of a group name.

    A plug-in is loaded when its name is asked for, and never because another one is. Nothing in a
    dataset can choose code that was not installed. A built-in name cannot be replaced. A dict, as
    each value of a sample is looked up.
    """

    def __init__(
        self,
        noun: str,
        group: str,
        built_in: Mapping[str, T],
        kind: type[T],
    ) -> None:
        super().__init__(built_in)
        self._noun = noun
        self._group = group
        self._kind = kind

    def names(self) -> list[str]:
        """Return all names that are known here, plug-ins included."""
        return [*self, *(name for name in self._plugins() if name not in self)]

    def find(self, name: str) -> T | None:
        """Return the code of a name, None where it is unknown; raise ConfigError for a plug-in
        that is none.
        """
        if name not in self:
            if name not in (plugins := self._plugins()):
                return None
            plugin = plugins[name]
            loaded = plugin.load()
            if not isinstance(loaded, self._kind):
                raise ConfigError(
                    f"entry point '{plugin.value}' of group '{self._group}' is "
                    f"{type(loaded).__name__}; a {self._noun} must be "
                    f"{self._kind.__module__}.{self._kind.__name__}"
                )
            self[name] = loaded
        return self[name]

    def __missing__(self, name: str) -> T:
        """Return the code of a plug-in; raise ConfigError where the name is unknown."""
        code = self.find(name)
        if code is None:
            raise ConfigError(
                f"the {self._noun} {name!r:.80} is unknown; known: {', '.join(self.names())}"
            )
        return code

    def _plugins(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}
