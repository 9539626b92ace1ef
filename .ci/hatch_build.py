"""Build hook: compiles the native camera-JPEG decoder into the package, where there is a C
compiler.

Without one the package installs and works as well, slower; `fuelrail doctor` says so.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("pipeline", "native")
FACE = Path(".src", "fuelrail")
HALLS = ("bench", "loaders", "pipeline", "sharding")


class NativeDecoderHook(BuildHookInterface):  # type: ignore[type-arg]  # the configuration's type is of no interest
    """For wheels, editable ones too."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in place; a library in the wheel makes it one of this platform, for any Python 3.

        An editable install finds the halls by links in the package's face. A checkout has them; an
        sdist cannot hold links, so they are made here.
        """
        for hall in HALLS if version == "editable" else ():
            link = Path(self.root) / FACE / hall
            if not link.exists():
                link.symlink_to(Path("..", "..", hall), target_is_directory=True)
        folder = Path(self.root) / NATIVE
        spec = importlib.util.spec_from_file_location("native_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            native.build(folder)
        except (native.BuildError, OSError) as error:
            (folder / native.LIBRARY_NAME).unlink(missing_ok=True)
            self.app.display_warning(f"The native camera-JPEG decoder is not built: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"/{(NATIVE / native.LIBRARY_NAME).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
