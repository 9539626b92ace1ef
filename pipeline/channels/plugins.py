"""A registry that installed packages add to by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from fuelrail.pipeline.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to code: what is built in, then what the entry points of a group name.

    A plug-in is loaded when its name is asked for, and never because another one is. Nothing in a dataset can choose
    code that was not installed. A built-in name cannot be replaced.
    """

    def __init__(self, what: str, group: str, built_in: Mapping[str, T], kind: type[T]) -> None:
        self._what, self._group, self._kind = what, group, kind
        self._known = dict(built_in)

    def names(self) -> list[str]:
        """All names that are known here, plug-ins included."""
        return [*self._known, *(name for name in self._plugins() if name not in self._known)]

    def find(self, name: str) -> T | None:
        """The code of a name, None where it is unknown; raises ConfigError for a plug-in that is none."""
        if name not in self._known:
            if name not in (found := self._plugins()):
                return None
            plugin = found[name]
            loaded = plugin.load()
            if not isinstance(loaded, self._kind):
                raise ConfigError(
                    f"entry point '{plugin.value}' of group '{self._group}' is {type(loaded).__name__}; a {self._what} "
                    f"must be {self._kind.__module__}.{self._kind.__name__}"
                )
            self._known[name] = loaded
        return self._known[name]

    def __getitem__(self, name: str) -> T:
        """The code of a name; raises ConfigError where it is unknown."""
        found = self._known.get(name) or self.find(name)  # each value of a sample passes here
        if found is None:
            raise ConfigError(f"the {self._what} {name!r:.80} is unknown; known: {', '.join(self.names())}")
        return found

    def _plugins(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}
